// Threads of the pool that stay awake between ops. Held by ops that consist of many small ones (a decode step).
#pragma once

namespace flashkernel {

/// While it lives, the pool's threads do not go to sleep between the ops of the thread that made it, each of which
/// would wake them again (some 30 us): they look for the next op in a loop, and yield their cores to whoever wants
/// them. As many threads as num_workers() says. Does nothing where the caller works alone, in a task of the pool, and
/// while another one lives.
class AwakeThreads {
 public:
  AwakeThreads();
  ~AwakeThreads();
  AwakeThreads(const AwakeThreads&) = delete;
  AwakeThreads& operator=(const AwakeThreads&) = delete;

 private:
  void* pool_ = nullptr;  // whose threads it keeps awake; null: none
};

}  // namespace flashkernel
