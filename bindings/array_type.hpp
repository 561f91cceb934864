// How Python's array types are told apart, and how values are shown in messages. Used by dlpack.cpp and op.cpp.
#pragma once

#include "dlpack.hpp"

namespace flashkernel::python {

/// Looks an attribute up without leaving an error behind when it is missing.
nb::object attribute_or_null(nb::handle object, const char* name);

/// str() and repr() as UTF-8 whatever characters they hold; the second cut where it gets long.
std::string text_of(nb::handle object);
std::string short_repr(nb::handle object);
/// "numpy.ndarray" of an array.
std::string type_text(nb::handle object);

/// The int at an index of a pair; false where there is no pair or no int that fits.
bool int_at(nb::handle pair, int index, std::int64_t& value);

/// What is wrong with an argument that is not an array.
std::string not_an_array(const char* op, const char* name, nb::handle array);

}  // namespace flashkernel::python
