// How CachingResource orders work of one stream after work of another. The CPU's answer is trivial (work has run when
// its call returns); CUDA's wraps cudaEvent_t. Called under the cache's lock; nothing here may block the host.
#pragma once

#include <cstdint>

#include "flashkernel/stream.hpp"

namespace flashkernel::detail {

class StreamEvents {
 public:
  virtual ~StreamEvents() = default;

  /// Equal for two streams exactly when the work of one always follows that of the other. (CUDA's per-thread default
  /// stream has one handle and many keys.)
  virtual std::uintptr_t key(Stream stream) const noexcept = 0;
  /// Marks the end of what is queued on `stream` now in `event`, which is created if null. False: it can't be marked
  /// (the stream is being captured, or is broken); its memory then stays with it.
  virtual bool record(void*& event, Stream stream) noexcept = 0;
  /// Whether everything before the mark has run.
  virtual bool done(void* event) noexcept = 0;
  /// Makes later work of `stream` start after the mark. False: it can't.
  virtual bool wait(Stream stream, void* event) noexcept = 0;
  virtual void destroy(void* event) noexcept = 0;

  /// What `stream` is being captured into: one number for all streams of a capture, 0 when it is not captured. Replays
  /// of the graph use the capture's memory again, so nothing else may until the graph is gone.
  virtual std::uint64_t capture(Stream) noexcept { return 0; }
  /// Calls gone(argument) once nothing can replay the graph that `stream` is being captured into, from any thread;
  /// `gone` must not call the device's API. False: it will not be called.
  virtual bool when_graph_is_gone(Stream, void (*)(void*), void*) noexcept { return false; }
};

/// Work has run when the call that queued it returns.
class HostStreamEvents final : public StreamEvents {
 public:
  std::uintptr_t key(Stream) const noexcept override { return 0; }  // one order for all of them
  bool record(void*&, Stream) noexcept override { return true; }
  bool done(void*) noexcept override { return true; }
  bool wait(Stream, void*) noexcept override { return true; }
  void destroy(void*) noexcept override {}
};

}  // namespace flashkernel::detail
