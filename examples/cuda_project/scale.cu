// Multiplies in place.
__global__ void scale_rows(float* x, const float* factor, int columns) {
  int row = blockIdx.x;
  for (int at = threadIdx.x; at < columns; at += blockDim.x) x[row * columns + at] *= factor[row];
}
