// How ops become Python functions: builtins whose signature, defaults and keyword errors come from one text. Used by
// the bind_*.cpp files that bind ops; errors.cpp turns what they throw into Python errors. Why not module_::def: its
// functions have no signature that `inspect` can read, and explain a wrong call by a list of overloads. This also takes
// less time.
#pragma once

#include <array>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "bindings.hpp"

namespace flashkernel::python {

/// The parameters of one op, read from text such as "def add(a: ArrayT, b: SupportsDLPack, *, out: ArrayT | None =
/// None)
/// -> ArrayT". Defaults are None, bools, numbers and strings in single quotes. What stands behind the arrow is for the
/// stub alone: overloads.py says how results depend on arguments there.
class Signature {
 public:
  static constexpr int kMaxParameters = 28;

  explicit Signature(const char* text);

  /// The value of each parameter, borrowed, by the rules of a Python call; false with a TypeError set where the call
  /// breaks them.
  bool fill(PyObject* const* args, Py_ssize_t num_args, PyObject* keywords, PyObject** values) const {
    for (int i = 0; i < count_; ++i) values[i] = parameters_[i].value;
    if (num_args > num_positional_) return refuse_positional(num_args);
    for (Py_ssize_t i = 0; i < num_args; ++i) values[i] = args[i];
    if (keywords) {
      int at = static_cast<int>(num_args) - 1;
      const Py_ssize_t count = PyTuple_Size(keywords);
      for (Py_ssize_t k = 0; k < count; ++k) {
        PyObject* const keyword = PyTuple_GetItem(keywords, k);
        at = find(keyword, at + 1);
        if (at < num_args) return refuse_keyword(keyword, at);
        values[at] = args[num_args + k];
      }
    }
    for (int i = static_cast<int>(num_args); i < num_required_; ++i)
      if (!values[i]) return refuse_missing(i);
    return true;
  }

  /// Sets a TypeError: parameter `i` can't be `value`.
  void refuse_value(int i, PyObject* value) const;

  const std::string& name() const noexcept { return name_; }
  int count() const noexcept { return count_; }
  /// Whether the last parameter is `backend`.
  bool has_backend() const noexcept { return has_backend_; }
  /// As CPython reads it from the docstring of a builtin: without annotations.
  std::string text() const;
  /// The docstring, with a line about `backend` for those who have it.
  std::string document(const char* doc) const;

 private:
  struct Parameter {
    std::string name, annotation, default_text;
    PyObject* key = nullptr;    // the interned name
    PyObject* value = nullptr;  // the default, or null
  };

  // Callers tend to give keywords in the order of the signature: the search starts at `first`.
  int find(PyObject* keyword, int first) const {
    for (int i = first; i < count_; ++i)
      if (parameters_[i].key == keyword) return i;
    return find_anywhere(keyword);
  }
  int find_anywhere(PyObject* keyword) const;
  bool refuse_positional(Py_ssize_t num_args) const;
  bool refuse_keyword(PyObject* keyword, int at) const;
  bool refuse_missing(int i) const;

  std::string name_;
  std::array<Parameter, kMaxParameters> parameters_;
  int count_ = 0, num_positional_ = 0, num_required_ = 0;
  bool has_backend_ = false;
};

/// Sets the Python error for the C++ exception that is being handled.
void set_python_error() noexcept;

/// The op of the same name in the module that `backend` names, called with the same arguments; null with an error set.
PyObject* call_backend(const Signature& signature, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords,
                       PyObject* backend);

/// What CPython calls for METH_FASTCALL | METH_KEYWORDS.
using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);

/// Puts a builtin into the module. `definition` is filled in and must live as long as the process.
void add_builtin(nb::module_& module, const Signature& signature, const char* doc, PyMethodDef& definition,
                 FastFunction function);

/// Whether nanobind's stub generator imports the module: it reads signatures from nanobind's own functions only.
bool is_generating_stub();

template <class T>
bool convert(PyObject* value, T& to) {
  if constexpr (std::is_same_v<T, nb::handle>) {
    to = value;
    return true;
  } else {
    return nb::try_cast(nb::handle(value), to);
  }
}

/// How many parameters of the signature one C++ parameter stands for: one, or `kParameters` of a struct that groups
/// some that several ops share. Such a struct has `take`, which reads them.
template <class T, class = void>
inline constexpr int kParametersOf = 1;
template <class T>
inline constexpr int kParametersOf<T, std::void_t<decltype(T::kParameters)>> = T::kParameters;

/// Reads `to` from the values of its parameters; -1, or which of them can't be what it is.
template <class T>
int take(PyObject** values, T& to) {
  if constexpr (1 < kParametersOf<T>) {
    return to.take(values);
  } else {
    return convert(values[0], to) ? -1 : 0;
  }
}

/// The place in the signature of each C++ parameter's first one.
template <class... Arguments>
constexpr std::array<int, sizeof...(Arguments) + 1> first_parameters() {
  std::array<int, sizeof...(Arguments) + 1> first{};
  std::size_t i = 0;
  ((first[i + 1] = first[i] + kParametersOf<std::decay_t<Arguments>>, ++i), ...);
  return first;
}

template <class Result, class... Arguments>
constexpr int count_parameters(Result (*)(Arguments...)) {
  return first_parameters<Arguments...>()[sizeof...(Arguments)];
}

template <class Result, class... Arguments, std::size_t... kIndex>
PyObject* call_with(Result (*function)(Arguments...), const Signature& signature, PyObject** values,
                    std::index_sequence<kIndex...>) {
  std::tuple<std::decay_t<Arguments>...> converted;
  constexpr auto first = first_parameters<Arguments...>();
  int bad = -1;
  const auto failed = [&](int at, int which) {
    bad = at + which;
    return which >= 0;
  };
  if ((failed(first[kIndex], take(values + first[kIndex], std::get<kIndex>(converted))) || ...)) {
    signature.refuse_value(bad, values[bad]);
    return nullptr;
  }
  if constexpr (std::is_void_v<Result>) {
    function(std::get<kIndex>(converted)...);
    return nb::none().release().ptr();
  } else {
    return Result(function(std::get<kIndex>(converted)...)).release().ptr();
  }
}

template <class Result, class... Arguments>
PyObject* call(Result (*function)(Arguments...), const Signature& signature, PyObject** values) {
  return call_with(function, signature, values, std::index_sequence_for<Arguments...>());
}

/// One op, known at compile time, so that its Python function reaches it without a detour.
template <auto kFunction>
struct Op {
  static inline const Signature* signature = nullptr;
  static inline PyMethodDef definition{};

  static PyObject* run(PyObject*, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) noexcept {
    PyObject* values[Signature::kMaxParameters];
    try {
      if (!signature->fill(args, num_args, keywords, values)) return nullptr;
      if (signature->has_backend() && values[signature->count() - 1] != Py_None)
        return call_backend(*signature, args, num_args, keywords, values[signature->count() - 1]);
      return call(kFunction, *signature, values);
    } catch (...) {
      set_python_error();
      return nullptr;
    }
  }
};

/// Binds an op whose C++ parameters are those of the signature, less `backend`.
template <auto kFunction>
void def_op(nb::module_& module, const char* signature, const char* doc) {
  using Bound = Op<kFunction>;
  Bound::signature = new Signature(signature);
  if (count_parameters(kFunction) != Bound::signature->count() - Bound::signature->has_backend())
    throw std::logic_error("flashkernel._C: " + Bound::signature->name() +
                           "'s C++ function takes other parameters than its signature says");
  if (is_generating_stub()) {
    const auto refuse = [](const nb::args&, const nb::kwargs&) {
      throw InvalidArgument("NB_STUBGEN is set: no op runs");
    };
    module.def(Bound::signature->name().c_str(), refuse, nb::sig(signature), Bound::signature->document(doc).c_str());
    return;
  }
  add_builtin(module, *Bound::signature, doc, Bound::definition, &Bound::run);
}

/// Registers a file's ops, so that no other file has to name them: `const OpFile registration(bind_rope);`. The module
/// binds them when it is made, and can't be imported where the list of ops (src/ops/op_list.hpp) has one that no file
/// binds.
class OpFile {
 public:
  explicit OpFile(void (*bind)(nb::module_& module)) : bind_(bind), next_(first_) { first_ = this; }
  static void bind_all(nb::module_& module) {
    for (const OpFile* file = first_; file; file = file->next_) file->bind_(module);
  }

 private:
  void (*bind_)(nb::module_& module);
  const OpFile* next_;
  static inline const OpFile* first_ = nullptr;
};

}  // namespace flashkernel::python
