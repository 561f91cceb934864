// Signatures of ops, and the sentences about calls that break them (see op.hpp).
#include "op.hpp"

#include <cstdlib>
#include <cstring>

#include "array_type.hpp"
#include "flashkernel/kernels.hpp"

namespace flashkernel::python {
namespace {

std::string trimmed(const std::string& text) {
  const auto first = text.find_first_not_of(' ');
  return first == std::string::npos ? std::string() : text.substr(first, text.find_last_not_of(' ') - first + 1);
}

// The parts of `text` between commas that are outside brackets and quotes.
std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  int depth = 0;
  bool quoted = false;
  for (const char c : text) {
    quoted = quoted != (c == '\'');
    depth += !quoted && (c == '[' || c == '(');
    depth -= !quoted && (c == ']' || c == ')');
    if (c == ',' && depth == 0 && !quoted)
      parts.emplace_back();
    else
      parts.back() += c;
  }
  return parts;
}

PyObject* default_of(const std::string& text) {
  PyObject* value = nullptr;
  if (text == "None")
    value = nb::none().release().ptr();
  else if (text == "True" || text == "False")
    value = PyBool_FromLong(text == "True");
  else if (text[0] == '\'')
    value = PyUnicode_FromString(text.substr(1, text.size() - 2).c_str());
  else if (text.find_first_of(".e") == std::string::npos)
    value = PyLong_FromString(text.c_str(), nullptr, 10);
  else
    value = PyFloat_FromDouble(std::strtod(text.c_str(), nullptr));
  if (!value) throw nb::python_error();
  return value;
}

std::string type_of(PyObject* value) {
  if (value == Py_None) return "None";
  const auto name = text_of(nb::handle(value).type().attr("__name__"));
  return (std::strchr("aeiou", name[0]) ? "an " : "a ") + name;
}

bool set_type_error(const std::string& message) {
  PyErr_SetString(PyExc_TypeError, message.c_str());
  return false;
}

}  // namespace

Signature::Signature(const char* text) {
  const std::string all = text;
  const auto open = all.find('('), close = all.rfind(") ->");
  name_ = all.substr(4, open - 4);  // after "def "
  bool keyword_only = false;
  for (const std::string& part : split(all.substr(open + 1, close - open - 1))) {
    const std::string item = trimmed(part);
    if (item == "*") {
      keyword_only = true;
      continue;
    }
    Parameter& parameter = parameters_.at(static_cast<std::size_t>(count_++));
    const auto colon = item.find(':'), equals = item.rfind(" = ");
    parameter.name = item.substr(0, colon);
    parameter.annotation = trimmed(item.substr(colon + 1, equals == std::string::npos ? equals : equals - colon - 1));
    parameter.key = PyUnicode_InternFromString(parameter.name.c_str());
    if (equals == std::string::npos) {
      num_required_ = count_;
    } else {
      parameter.default_text = item.substr(equals + 3);
      parameter.value = default_of(parameter.default_text);
    }
    if (!keyword_only) num_positional_ = count_;
  }
  has_backend_ = count_ > 0 && parameters_[count_ - 1].name == "backend";
}

std::string Signature::text() const {
  std::string text = name_ + "(";
  for (int i = 0; i < count_; ++i) {
    if (i == num_positional_) text += "*, ";
    text += parameters_[i].name;
    if (parameters_[i].value) text += "=" + parameters_[i].default_text;
    text += i + 1 < count_ ? ", " : ")";
  }
  return text;
}

int Signature::find_anywhere(PyObject* keyword) const {
  for (int i = 0; i < count_; ++i)
    if (PyUnicode_Compare(parameters_[i].key, keyword) == 0) return i;
  return -1;
}

bool Signature::refuse_positional(Py_ssize_t num_args) const {
  std::string message = name_ + ": " + std::to_string(num_args) + " positional arguments are given and at most " +
                        std::to_string(num_positional_) + " are taken";
  if (num_positional_ < count_) message += "; '" + parameters_[num_positional_].name + "' and what follows it need ";
  return set_type_error(message + (num_positional_ < count_ ? "their names: " : ": ") + text());
}

// What was meant by an unknown keyword, by the letters that they share; empty when nothing is like it.
static std::string closest(const std::string& keyword, const std::vector<std::string>& names) {
  for (const std::string& name : names)  // softmax_scale, is_causal
    if (name.size() > 2 && (keyword.find(name) != std::string::npos || name.find(keyword) == 0)) return name;
  nb::list list;
  for (const std::string& name : names) list.append(name);
  const nb::object matches = nb::module_::import_("difflib").attr("get_close_matches")(keyword, list, 1);
  return nb::len(matches) == 0 ? std::string() : nb::cast<std::string>(matches[0]);
}

bool Signature::refuse_keyword(PyObject* keyword, int at) const {
  const std::string given = text_of(keyword);
  if (at >= 0) return set_type_error(name_ + ": '" + given + "' is given twice, by position and by name: " + text());
  std::vector<std::string> names;
  for (int i = 0; i < count_; ++i) names.push_back(parameters_[i].name);
  const std::string meant = closest(given, names);
  return set_type_error(name_ + ": unknown keyword '" + given + "'; " +
                        (meant.empty() ? "the" : "did you mean '" + meant + "'? The") + " call is " + text());
}

bool Signature::refuse_missing(int i) const {
  return set_type_error(name_ + ": '" + parameters_[i].name + "' is missing; the call is " + text());
}

void Signature::refuse_value(int i, PyObject* value) const {
  std::string needed = parameters_[i].annotation;
  for (auto at = needed.find("typing."); at != std::string::npos; at = needed.find("typing.")) needed.erase(at, 7);
  for (auto at = needed.find(" | "); at != std::string::npos; at = needed.find(" | ")) needed.replace(at, 3, " or ");
  set_type_error(name_ + ": " + parameters_[i].name + " is " + type_of(value) +
                 (value == Py_None ? "" : " (" + short_repr(value) + ")") + "; " + needed + " is needed");
}

bool is_generating_stub() { return std::getenv("NB_STUBGEN") != nullptr; }

std::string Signature::document(const char* doc) const {
  std::string text = doc;
  if (!has_backend_) return text;
  const auto at = text.find("\nRaises:");
  text.insert(
      at == std::string::npos ? text.size() : at,
      "backend: ``\"triton\"`` runs the op of the same name in ``flashkernel.triton``, for torch tensors; None: "
      "this library.\n");
  return text;
}

void add_builtin(nb::module_& module, const Signature& signature, const char* doc, PyMethodDef& definition,
                 FastFunction function) {
  // Never freed: the builtin points to it.
  auto* const with_signature = new std::string(signature.text() + "\n--\n\n" + signature.document(doc));
  const auto entry = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
  definition = {signature.name().c_str(), entry, METH_FASTCALL | METH_KEYWORDS, with_signature->c_str()};
  const nb::str public_module("flashkernel");
  PyObject* const builtin = PyCFunction_NewEx(&definition, module.ptr(), public_module.ptr());
  if (!builtin) throw nb::python_error();
  module.attr(signature.name().c_str()) = nb::steal(builtin);
}

void bind_ops(nb::module_& module) {
  OpFile::bind_all(module);
  nb::dict ops;
  for (const OpInfo& info : flashkernel::ops()) {
    if (!nb::hasattr(module, info.name.c_str()))
      throw std::logic_error("flashkernel._C: src/ops/op_list.hpp has the op " + info.name +
                             "; a bind_*.cpp file that binds it is needed");
    ops[info.name.c_str()] = info.op;
  }
  module.attr("OPS") = ops;
}

}  // namespace flashkernel::python
