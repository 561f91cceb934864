// What the bindings know of Python's array types (see dlpack.hpp), and the sentences about values that are no arrays.
#include "array_type.hpp"

#include <unordered_map>

#include "array.hpp"
#include "torch_tensor.hpp"

namespace flashkernel::python {
namespace {

// True where a class of this name, or one derived from it, comes from the package.
bool derives_from(nb::handle type, const char* package, std::initializer_list<const char*> names) {
  const nb::object mro = attribute_or_null(type, "__mro__");
  if (!mro.is_valid()) return false;
  for (const nb::handle base : nb::borrow<nb::tuple>(mro)) {
    const std::string module = text_of(base.attr("__module__"));
    const bool is_inside = module == package || module.rfind(std::string(package) + ".", 0) == 0;
    const std::string name = text_of(base.attr("__name__"));
    for (const char* wanted : names)
      if (is_inside && name == wanted) return true;
  }
  return false;
}

bool is_jax_tracer(nb::handle type) { return derives_from(type, "jax", {"Tracer"}); }
bool is_torch_stand_in(nb::handle type) {
  return derives_from(type, "torch", {"FakeTensor", "FunctionalTensor", "Proxy"});
}

// The table in the chain whose major version is ours; null if there is none.
const dlpack::ExchangeApi* exchange_api(nb::handle type) {
  const nb::object capsule = attribute_or_null(type, "__dlpack_c_exchange_api__");
  if (!capsule.is_valid() || !PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  const auto* header =
      static_cast<const dlpack::ExchangeHeader*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (header && header->version.major != dlpack::kVersion.major) header = header->previous;
  const auto* api = reinterpret_cast<const dlpack::ExchangeApi*>(header);
  return api && api->allocate && api->managed_from_object && api->managed_to_object && api->current_work_stream
             ? api
             : nullptr;
}

ArrayType look_up(PyTypeObject* type) {
  const nb::handle handle(reinterpret_cast<PyObject*>(type));
  ArrayType entry;
  entry.type = type;
  if (is_jax_tracer(handle) || is_torch_stand_in(handle)) return entry;
  if (PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(numpy_attribute("ndarray").ptr()))) {
    entry.framework = Framework::kNumpy;
  } else if (type == reinterpret_cast<PyTypeObject*>(nb::type<Array>().ptr())) {
    entry.framework = Framework::kOwn;
  } else if ((entry.api = exchange_api(handle)) != nullptr) {
    entry.framework = Framework::kExchange;
    entry.is_torch = is_torch(type);
  } else if (attribute_or_null(handle, "__dlpack__").is_valid() &&
             attribute_or_null(handle, "__dlpack_device__").is_valid()) {
    entry.framework = Framework::kProtocol;
    entry.is_cupy = derives_from(handle, "cupy", {"ndarray"});
  }
  return entry;
}

// A type's entry goes when the type does: classes that are made at run time must not be kept alive by a call.
struct Known {
  ArrayType entry;
  nb::object reference;  // weak; calls `forget`
};

// Guarded by the GIL. Never destroyed: the interpreter may be gone by then.
std::unordered_map<PyTypeObject*, Known>& known_types() {
  static auto* const types = new std::unordered_map<PyTypeObject*, Known>;
  return *types;
}
const ArrayType* last = nullptr;

PyObject* forget(PyObject* address, PyObject*) {
  last = nullptr;
  known_types().erase(static_cast<PyTypeObject*>(PyLong_AsVoidPtr(address)));
  return nb::none().release().ptr();
}
PyMethodDef forget_definition{"forget", &forget, METH_O, nullptr};

}  // namespace

nb::object attribute_or_null(nb::handle object, const char* name) {
  PyObject* value = PyObject_GetAttrString(object.ptr(), name);
  if (!value) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw nb::python_error();
    PyErr_Clear();
  }
  return nb::steal(value);
}

std::string text_of(nb::handle object) {
  const nb::object text = nb::steal(PyObject_Str(object.ptr()));
  if (!text.is_valid()) throw nb::python_error();
  const nb::object bytes = nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes.is_valid()) throw nb::python_error();
  return PyBytes_AsString(bytes.ptr());
}

std::string short_repr(nb::handle object) {
  const std::string text = text_of(nb::repr(object));
  return text.size() <= 80 ? text : text.substr(0, 80) + "...";
}

std::string type_text(nb::handle object) {
  const nb::handle type = object.type();
  const std::string module = text_of(type.attr("__module__")), name = text_of(type.attr("__qualname__"));
  return module == "builtins" ? name : module + "." + name;
}

bool int_at(nb::handle pair, int index, std::int64_t& value) {
  if (!nb::isinstance<nb::tuple>(pair) && !nb::isinstance<nb::list>(pair)) return false;
  return nb::len(pair) == 2 && nb::try_cast(nb::object(pair[index]), value);
}

std::string not_an_array(const char* op, const char* name, nb::handle array) {
  const std::string start = std::string(op) + ": " + name + " is ";
  if (array.is_none()) return start + "None; an array that speaks DLPack is needed (torch, NumPy, JAX, CuPy, ...)";
  if (is_jax_tracer(array.type()))
    return start + "a JAX tracer (" + type_text(array) +
           "); FlashKernel's ops can't run under jax.jit, grad or vmap: call them outside";
  if (is_torch_stand_in(array.type())) return start + "a " + type_text(array) + "; " + where_traced(op);
  return start + "a " + type_text(array) + "; an array that speaks DLPack is needed (torch, NumPy, JAX, CuPy, ...)";
}

const ArrayType& array_type(PyTypeObject* type) {
  if (last && last->type == type) return *last;
  auto& types = known_types();
  auto found = types.find(type);
  if (found == types.end()) {
    const ArrayType entry = look_up(type);
    if (entry.framework == Framework::kNotArray) {
      static const ArrayType not_array;
      return not_array;
    }
    const nb::object address = nb::steal(PyLong_FromVoidPtr(type));
    const nb::object callback = nb::steal(PyCFunction_NewEx(&forget_definition, address.ptr(), nullptr));
    const nb::object reference = nb::steal(PyWeakref_NewRef(reinterpret_cast<PyObject*>(type), callback.ptr()));
    if (!reference.is_valid()) throw nb::python_error();
    found = types.emplace(type, Known{entry, reference}).first;
  }
  return *(last = &found->second.entry);
}

}  // namespace flashkernel::python
