// SPDX-License-Identifier: Apache-2.0
//
// A kernel that others wrote: FlashInfer's own SM120 MXFP4 grouped GEMM (CUTLASS builder), instantiated from the
// wheel's header and called through one plain function a tile. All of them in one source: reading the headers takes
// longer than compiling a kernel.
#include <flashinfer/gemm/group_gemm_mxfp4_groupwise_sm120.cuh>

using namespace flashinfer;              // NOLINT: as the header's macro expects
using namespace flashinfer::group_gemm;  // NOLINT

// N of a tile, and whether the operands change places: those that published figures of a GB10 were made with.
#define FOR_EACH_TILE(X) X(128, false) X(64, true)

#define INSTANTIATE(N, SWAP)                                                                                        \
  INSTANTIATE_GROUP_GEMM_MXFP4_GROUPWISE_SM120(128, N, 128, SWAP, cutlass::float_e4m3_t, cutlass::float_e2m1_t,     \
                                               cutlass::float_ue8m0_t, cutlass::float_ue8m0_t, cutlass::bfloat16_t, \
                                               float_e4m3_t, float_e2m1_t, float_ue8m0_t, float_ue8m0_t, bfloat16_t)

// All pointers are device memory; the buffers are FlashInfer's integer and float workspaces. -1: an exception.
#define DEFINE_FUNCTION(N, SWAP)                                                                                     \
  extern "C" int group_gemm_##N##_##SWAP(void* int_buffer, size_t int_bytes, void* float_buffer, size_t float_bytes, \
                                         void* a, void* b, void* sfa, void* sfb, void* out, int* m_indptr, int n,    \
                                         int k, int groups) {                                                        \
    try {                                                                                                            \
      return CutlassMXFP4GroupwiseScaledGroupGEMMSM120<128, N, 128, SWAP>(                                           \
          int_buffer, int_bytes, float_buffer, float_bytes, static_cast<cutlass::float_e4m3_t*>(a),                  \
          static_cast<cutlass::float_e2m1_t*>(b), static_cast<cutlass::float_ue8m0_t*>(sfa),                         \
          static_cast<cutlass::float_ue8m0_t*>(sfb), static_cast<cutlass::bfloat16_t*>(out), m_indptr, n, k, groups, \
          nullptr, 0);                                                                                               \
    } catch (const std::exception& error) {                                                                          \
      std::fprintf(stderr, "%s\n", error.what());                                                                    \
      return -1;                                                                                                     \
    }                                                                                                                \
  }

namespace flashinfer {
namespace group_gemm {

FOR_EACH_TILE(INSTANTIATE)

}  // namespace group_gemm
}  // namespace flashinfer

FOR_EACH_TILE(DEFINE_FUNCTION)
