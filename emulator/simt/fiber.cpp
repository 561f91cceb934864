// See fiber.hpp.
#include "simt/fiber.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#ifndef __x86_64__
#include <ucontext.h>

#include <map>
#endif

namespace simt {

unsigned char* new_stack() {
  constexpr std::size_t kGuard = 64 * 1024;  // the largest page of the systems this runs on
  void* const memory = mmap(nullptr, kStackBytes + kGuard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuard, PROT_NONE) != 0) {
    std::perror("emulator: no memory for a thread's stack");
    std::abort();
  }
  return static_cast<unsigned char*>(memory) + kGuard;
}

#ifdef __x86_64__

// System V: rbx, rbp and r12 to r15 survive a call; everything else the caller has saved.
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch, .-simt_switch
)");

void* prepare_stack(unsigned char* stack, void (*entry)()) {
  auto top = reinterpret_cast<std::uintptr_t>(stack + kStackBytes) & ~std::uintptr_t{63};
  // Stacks lie at multiples of 64 KB: if all started at the same place in theirs, the frames of a warp's lanes would
  // share a few lines of the processor's first cache and push each other out at every switch. So they start 15 lines
  // apart.
  top -= (reinterpret_cast<std::uintptr_t>(stack) >> 16) * 5 % 64 * 64;
  auto* words = reinterpret_cast<std::uintptr_t*>(top);
  *--words = 0;  // entry's return address: it never returns; also keeps rsp % 16 == 8 at its first instruction
  *--words = reinterpret_cast<std::uintptr_t>(entry);
  for (int saved = 0; saved < 6; ++saved) *--words = 0;
  return words;
}

#else

namespace {
// One context a stack, and one for what called from outside of any.
struct Context {
  ucontext_t machine;
};
}  // namespace

extern "C" void simt_switch(void** from, void* to) {
  static Context outside;
  if (!*from) *from = &outside;
  swapcontext(&static_cast<Context*>(*from)->machine, &static_cast<Context*>(to)->machine);
}

void* prepare_stack(unsigned char* stack, void (*entry)()) {
  static std::map<unsigned char*, Context*>& contexts = *new std::map<unsigned char*, Context*>;
  Context*& context = contexts[stack];
  if (!context) context = new Context;
  getcontext(&context->machine);
  context->machine.uc_stack.ss_sp = stack;
  context->machine.uc_stack.ss_size = kStackBytes;
  context->machine.uc_link = nullptr;
  makecontext(&context->machine, entry, 0);
  return context;
}

#endif

}  // namespace simt
