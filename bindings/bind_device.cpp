// Binds device.hpp: threads, CPU features, number of GPUs; and how the build was made (FK_BUILD_* come from
// CMakeLists.txt).
#include "flashkernel/device.hpp"

#include <sstream>

#include "bindings.hpp"

namespace flashkernel::python {

void bind_device(nb::module_& module) {
  module.def("set_num_threads", &flashkernel::set_num_threads, "count"_a,
             "Set the threads that CPU kernels use, the caller's included; at least 1. Takes effect at the next op.");
  module.def("get_num_threads", &flashkernel::num_threads,
             "Threads that CPU kernels use, the caller's included. Starts as OMP_NUM_THREADS, else the cores that this "
             "process may "
             "run on.");
  module.def("num_cuda_devices", &flashkernel::num_cuda_devices,
             "CUDA devices that this build can use: 0 without CUDA, without a driver, or without a GPU.");
  module.def(
      "cpu_features",
      [] {
        std::vector<std::string> features;
        std::istringstream words(flashkernel::cpu_features());
        for (std::string word; words >> word;) features.push_back(word);
        return features;
      },
      "CPU features that the library found and may use, such as ``['avx2', 'avx512']``.");
  module.def(
      "build_info",
      [] {
        nb::dict info;
        info["compiler"] = FK_BUILD_COMPILER;
        info["build_type"] = FK_BUILD_TYPE;
        info["cuda"] = static_cast<bool>(FK_BUILD_CUDA);
        info["cuda_reason"] = FK_BUILD_CUDA_REASON;
        return info;
      },
      nb::sig("def build_info() -> dict[str, typing.Any]"),
      "How this build was made: compiler, build type, whether the CUDA backend is in it, and why or why not.");
}

}  // namespace flashkernel::python
