// Launches from the C interfaces.

#pragma once

#include <cuda_runtime.h>

// A kernel of one parameter block. `early`: it may start while the kernel before it in the stream ends, which it must
// wait for (`wait_for_kernels_before`). `cluster`: blocks of a cluster, above 8 only where the device grants such.
template <class Params>
cudaError_t launch_kernel(void (*kernel)(Params), const Params& params, dim3 blocks, int threads, int shared_bytes,
                          bool early, cudaStream_t stream, int cluster = 1) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess && cluster > 8) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  int number = 0;
  if (early) {
    attributes[number].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[number++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[number].id = cudaLaunchAttributeClusterDimension;
    attributes[number].val.clusterDim.x = cluster;
    attributes[number].val.clusterDim.y = attributes[number].val.clusterDim.z = 1;
    ++number;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = number;
  return cudaLaunchKernelEx(&config, kernel, params);
}
