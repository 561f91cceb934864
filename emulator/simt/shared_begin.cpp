// The begin of the kernels' __shared__ variables in memory: linked before the kernels. See shared.cpp.
namespace simt {
extern __thread char shared_begin;
alignas(1024) __thread char shared_begin;
}  // namespace simt
