// SPDX-License-Identifier: Apache-2.0
// cudaGetLastError and its kin, and the names of the error codes.
#include <algorithm>
#include <iterator>

#include "shim/runtime.h"

using namespace vsm;        // NOLINT: the names below are CUDA's
using namespace vsm::shim;  // NOLINT

namespace {

struct ErrorName {
  int code;
  const char* name;
  const char* text;
};

// The codes that this runtime can answer with. The texts are this project's own, but for the shortest.
constexpr ErrorName kErrors[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {9, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {13, "cudaErrorInvalidSymbol", "invalid device symbol"},
    {21, "cudaErrorInvalidMemcpyDirection", "unknown direction of a copy"},
    {98, "cudaErrorInvalidDeviceFunction", "not a kernel that was registered"},
    {100, "cudaErrorNoDevice", "no device"},
    {101, "cudaErrorInvalidDevice", "no device of this number"},
    {200, "cudaErrorInvalidKernelImage", "malformed device code"},
    {209, "cudaErrorNoKernelImageForDevice", "no device code that this device can run"},
    {218, "cudaErrorInvalidPtx", "PTX that was not accepted"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {401, "cudaErrorIllegalState", "not allowed in this state"},
    {600, "cudaErrorNotReady", "not finished yet"},
    {700, "cudaErrorIllegalAddress", "a kernel accessed memory that is not allocated"},
    {701, "cudaErrorLaunchOutOfResources", "the launch asks for more registers than there are"},
    {702, "cudaErrorLaunchTimeout", "a kernel did not end: its warps wait for one another, or it ran past its bound"},
    {713, "cudaErrorHostMemoryNotRegistered", "host memory that was not registered"},
    {715, "cudaErrorIllegalInstruction", "a kernel executed an instruction with operands that it does not take"},
    {716, "cudaErrorMisalignedAddress", "a kernel accessed memory at an address of the wrong alignment"},
    {719, "cudaErrorLaunchFailure", "a kernel failed"},
    {720, "cudaErrorCooperativeLaunchTooLarge", "a cooperative grid larger than what is resident at a time"},
    {801, "cudaErrorNotSupported", "not modelled by the virtual device"},
    {900, "cudaErrorStreamCaptureUnsupported", "not allowed while a stream captures"},
    {901, "cudaErrorStreamCaptureInvalidated", "the capture was made invalid by an earlier call"},
    {903, "cudaErrorStreamCaptureUnmatched", "the capture was not begun on this stream"},
    {906, "cudaErrorStreamCaptureImplicit", "the default stream would have to wait for a stream that captures"},
    {912, "cudaErrorInvalidClusterSize", "cluster dimensions that this device does not take"},
    {999, "cudaErrorUnknown", "unknown error"},
};

const ErrorName* find_error(int code) {
  auto found = std::find_if(std::begin(kErrors), std::end(kErrors), [=](const ErrorName& e) { return e.code == code; });
  return found == std::end(kErrors) ? nullptr : found;
}

}  // namespace

extern "C" {

int cudaGetLastError() {
  const int error = last_error();
  last_error() = abi::kSuccess;
  return error;
}

int cudaPeekAtLastError() { return last_error(); }

const char* cudaGetErrorName(int code) {
  const ErrorName* found = find_error(code);
  return found ? found->name : "unrecognized error code";
}

const char* cudaGetErrorString(int code) {
  const ErrorName* found = find_error(code);
  return found ? found->text : "unrecognized error code";
}

}  // extern "C"
