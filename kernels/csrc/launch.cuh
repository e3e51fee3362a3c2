// Launches from the C interfaces.

#pragma once

#include <cuda_runtime.h>

// A kernel of one parameter block. `early`: it may start while the kernel before it in the stream ends, which it must
// wait for (`wait_for_kernels_before`).
template <class Params>
cudaError_t launch_kernel(void (*kernel)(Params), const Params& params, int blocks, int threads, int shared_bytes,
                          bool early, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early;
  return cudaLaunchKernelEx(&config, kernel, params);
}
