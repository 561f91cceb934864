// Errors at the C boundary: each thread keeps the last one.
#include <new>
#include <string>

#include "c/call.hpp"
#include "flashkernel/flashkernel.h"

namespace flashkernel::c {
namespace {

struct LastError {
  fk_error_details details{};
  std::string message;
  const char* text = "";  // the message, or a literal where there was no memory for it
};

LastError& last_error() noexcept {
  thread_local LastError error;
  return error;
}

fk_status keep(fk_status status, const char* message, fk_error_details details) noexcept {
  LastError& error = last_error();
  details.status = status;
  error.details = details;
  try {
    error.message = message;
    error.text = error.message.c_str();
  } catch (...) {
    error.text = "out of memory; there was none for the message either";
  }
  return status;
}

}  // namespace

fk_status status_of_exception() noexcept {
  fk_error_details details{};
  try {
    throw;
  } catch (const BadBlockTable& error) {
    details.sequence = error.sequence;
    details.slot = error.slot;
    details.page = error.page;
    return keep(FK_BAD_BLOCK_TABLE, error.what(), details);
  } catch (const InvalidArgument& error) {
    return keep(FK_INVALID_ARGUMENT, error.what(), details);
  } catch (const Unsupported& error) {
    return keep(FK_UNSUPPORTED, error.what(), details);
  } catch (const OutOfMemory& error) {
    details.requested_bytes = error.requested_bytes;
    details.free_bytes = error.free_bytes;
    details.peak_bytes = error.peak_bytes;
    const auto* const pages = dynamic_cast<const OutOfPages*>(&error);
    if (!pages) return keep(FK_OUT_OF_MEMORY, error.what(), details);
    details.requested_pages = pages->requested_pages;
    details.free_pages = pages->free_pages;
    details.num_pages = pages->num_pages;
    return keep(FK_OUT_OF_PAGES, error.what(), details);
  } catch (const CudaError& error) {
    details.cuda_code = error.code;
    return keep(FK_CUDA_ERROR, error.what(), details);
  } catch (const std::bad_alloc&) {
    return keep(FK_OUT_OF_MEMORY, "out of memory: the host has none for the call's own bookkeeping", details);
  } catch (const std::exception& error) {
    return keep(FK_INTERNAL_ERROR, error.what(), details);
  } catch (...) {
    return keep(FK_INTERNAL_ERROR, "an exception that is no std::exception", details);
  }
}

void check_size(const char* what, std::size_t size, std::size_t first, std::size_t known) {
  if (size >= first && size <= known) return;
  throw InvalidArgument(std::string(what) + ": size is " + std::to_string(size) + "; this library knows " +
                        (first == known ? "" : "from " + std::to_string(first) + " to ") + std::to_string(known) +
                        " bytes: call its _init function, with the header of this version");
}

void check_pointer(const char* what, const void* pointer) {
  if (!pointer) throw InvalidArgument(std::string(what) + " is NULL; it must point to memory or be a handle");
}

void check_array(const char* what, const void* pointer, std::int64_t count) {
  if (count > 0 && !pointer)
    throw InvalidArgument(std::string(what) + " is NULL; it must have " + std::to_string(count) + " entries");
}

}  // namespace flashkernel::c

const char* fk_last_error_message(void) { return flashkernel::c::last_error().text; }

fk_status fk_last_error_details(fk_error_details* details, size_t size) {
  using namespace flashkernel::c;
  // The answer is about the last error: a refusal here must not replace it.
  if (!details || size < kFirstSize<fk_error_details> || size > sizeof *details) return FK_INVALID_ARGUMENT;
  give("details", last_error().details, details, size);
  return FK_OK;
}

const char* fk_status_name(fk_status status) {
  switch (status) {
    case FK_OK: return "FK_OK";
    case FK_INVALID_ARGUMENT: return "FK_INVALID_ARGUMENT";
    case FK_BAD_BLOCK_TABLE: return "FK_BAD_BLOCK_TABLE";
    case FK_UNSUPPORTED: return "FK_UNSUPPORTED";
    case FK_OUT_OF_MEMORY: return "FK_OUT_OF_MEMORY";
    case FK_OUT_OF_PAGES: return "FK_OUT_OF_PAGES";
    case FK_CUDA_ERROR: return "FK_CUDA_ERROR";
    case FK_INTERNAL_ERROR: return "FK_INTERNAL_ERROR";
    default: return "unknown status";
  }
}
