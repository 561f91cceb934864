// Binds kernels.hpp, execution.hpp and invariant.hpp: kernels, explain, force_kernels, forced_kernels, is_invariant.
#include "flashkernel/kernels.hpp"

#include <cstdio>
#include <optional>

#include "bindings.hpp"
#include "flashkernel/invariant.hpp"

namespace flashkernel::python {
namespace {

Explanation explain(const std::string& op, const nb::args& args, const nb::kwargs& kwargs) {
  if (kwargs.contains("backend"))
    throw InvalidArgument("explain: backend=" + nb::cast<std::string>(nb::repr(kwargs["backend"])) +
                          "; the kernels of this library are explained, leave backend out");
  const auto ops = flashkernel::ops();
  if (std::none_of(ops.begin(), ops.end(), [&](const OpInfo& info) { return info.name == op; }))
    throw InvalidArgument("explain: op='" + op + "'; the name of an op is needed, such as 'attention' or 'linear'");
  const nb::object function = nb::module_::import_("flashkernel._C").attr(op.c_str());
  Explanation explanation;
  const ExplainScope scope(&explanation);
  function(*args, **kwargs);
  return explanation;
}

/// "3.21 us".
std::string microseconds(float value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g us", static_cast<double>(value));
  return text;
}

std::string verdict_text(const KernelVerdict& verdict) {
  return verdict.kernel + ": " +
         (verdict.accepted ? "accepts, modelled " + microseconds(verdict.modelled_us) : verdict.reason);
}

std::string to_text(const Explanation& explanation) {
  std::string text = explanation.op + ": " + (explanation.kernel.empty() ? "no kernel" : explanation.kernel);
  text += ", workspace " + std::to_string(explanation.workspace_bytes) + " bytes";
  if (explanation.invariant) text += ", invariant mode, arithmetic " + explanation.arithmetic;
  for (const auto& candidate : explanation.candidates) text += "\n  " + verdict_text(candidate);
  return text;
}

/// An InvariantScope whose end Python decides.
struct Scope {
  std::optional<InvariantScope> scope{std::in_place};
};

}  // namespace

void bind_kernels(nb::module_& module) {
  nb::class_<KernelInfo>(module, "KernelInfo", "One kernel of this build; see `kernels`.")
      .def_ro("id", &KernelInfo::id, "Such as ``attention_fwd/cpu/avx512``: op, backend, instance.")
      .def_ro("op", &KernelInfo::op, "Which op it serves.")
      .def_prop_ro(
          "device", [](const KernelInfo& info) { return info.device == DeviceType::kCpu ? "cpu" : "cuda"; },
          "``cpu`` or ``cuda``.")
      .def_ro("cc_min", &KernelInfo::cc_min, "Least compute capability (75 is 7.5); 0 on the CPU.")
      .def_ro("cc_max", &KernelInfo::cc_max, "Greatest compute capability; 0 on the CPU.")
      .def_ro("cpu_features", &KernelInfo::cpu_features, "CPU features that it needs.")
      .def_ro("arithmetic", &KernelInfo::arithmetic,
              "The order of its sums: kernels of one op that have the same give the same bits for the same call.")
      .def_ro("available", &KernelInfo::available, "Whether this machine can run it.")
      .def_ro("calls", &KernelInfo::calls, "Launches since the process started.")
      .def("__repr__", [](const KernelInfo& info) {
        return "KernelInfo(" + info.id + ", arithmetic=" + info.arithmetic +
               ", available=" + (info.available ? "True" : "False") + ", calls=" + std::to_string(info.calls) + ")";
      });
  nb::class_<KernelVerdict>(module, "KernelVerdict", "What one kernel said about a call; see `explain`.")
      .def_ro("kernel", &KernelVerdict::kernel, "Its id.")
      .def_ro("accepted", &KernelVerdict::accepted, "Whether it can serve the call.")
      .def_ro("reason", &KernelVerdict::reason, "Why not; empty when it accepts.")
      .def_ro("modelled_us", &KernelVerdict::modelled_us,
              "Microseconds by the model that the choice follows (which may be far from what is measured); 0 when it "
              "refuses.")
      .def("__repr__", [](const KernelVerdict& verdict) { return "KernelVerdict(" + verdict_text(verdict) + ")"; });
  nb::class_<Explanation>(module, "Explanation",
                          "Which kernel a call would run, and why; str() of it is a readable text.")
      .def_ro("op", &Explanation::op, "The op, as kernel ids name it.")
      .def_ro("kernel", &Explanation::kernel, "Id of the kernel that would run.")
      .def_ro("workspace_bytes", &Explanation::workspace_bytes, "Scratch memory that its plan takes.")
      .def_ro("modelled_us", &Explanation::modelled_us, "What the model says of it, in microseconds.")
      .def_ro("arithmetic", &Explanation::arithmetic,
              "The order in which the kernel adds, as `KernelInfo.arithmetic` names it.")
      .def_ro("invariant", &Explanation::invariant, "Whether the call is made in the invariant mode.")
      .def_ro("candidates", &Explanation::candidates, "What each kernel said.")
      .def("__str__", &to_text)
      .def("__repr__", [](const Explanation& explanation) {
        return "Explanation(" + explanation.op + " -> " + explanation.kernel + ")";
      });

  module.def(
      "kernels", &flashkernel::kernels,
      R"doc(Every kernel of this build, by op. Of kernels that would take equally long, the first one listed runs.

Example:

>>> import flashkernel as fk
>>> "attention_fwd" in {kernel.op for kernel in fk.kernels()}
True
)doc");
  module.def(
      "explain", &explain, "op"_a, "args"_a, "kwargs"_a,
      nb::sig("def explain(op: str, *args: typing.Any, **kwargs: typing.Any) -> Explanation"),
      R"doc(Which kernel `flashkernel.<op>(*args, **kwargs)` would run, and what each candidate said. Nothing runs.

Of the kernels that accept the call, the one with the least modelled time runs; each candidate has its own.

The arguments are validated as by the op itself and raise what it would raise, NotImplementedError included.

Example:

>>> import numpy as np, flashkernel as fk
>>> q = np.ones((1, 1, 4, 8), np.float32)
>>> fk.explain("attention", q, q, q, causal=True).kernel.split("/")[0]
'attention_fwd'
)doc");
  module.def(
      "force_kernels", &flashkernel::force_kernels, "patterns"_a,
      "Restrict the choice to kernels whose id matches: \"attention_fwd/cpu/scalar\", a prefix of it "
      "(\"attention_fwd/cpu\"), or "
      "with \"*\" for the op (\"*/cpu/scalar\"); several, comma-separated. Ops that no pattern names choose freely. "
      "Empty: no restriction. A pattern with \"?\" at its end only puts its kernels before all others where they "
      "accept "
      "the call. Process-wide; starts as the environment variable FLASHKERNEL_FORCE. ValueError if nothing matches. "
      "`force` does this for a block of code.");
  nb::class_<Scope>(module, "_InvariantScope", "What `invariant` holds while its block runs.")
      .def(nb::init<>())
      .def(
          "close", [](Scope& scope) { scope.scope.reset(); }, "Ends it.");
  module.def("is_invariant", &flashkernel::is_invariant,
             "Whether the process is in the invariant mode: within `invariant`, or by FLASHKERNEL_INVARIANT=1.");
  module.def("forced_kernels", &flashkernel::forced_kernels, "The patterns in force; empty if none.");
}

}  // namespace flashkernel::python
