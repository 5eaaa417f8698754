// SPDX-License-Identifier: Apache-2.0
// Lane loops compiled for several vector widths, of which the library picks one when it is loaded. Every width computes the
// same bits: no loop that is marked so contracts a multiplication and an addition, and none changes the order of a sum.
#pragma once

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define VSM_VECTOR_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VSM_VECTOR_CLONES
#endif
