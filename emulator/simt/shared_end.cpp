// The end of the kernels' __shared__ variables in memory: linked after the kernels. See shared.cpp.
namespace simt {
extern __thread char shared_end;
alignas(64) __thread char shared_end;
}  // namespace simt
