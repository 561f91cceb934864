// See race.hpp: from addresses of code to lines of the kernels.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "simt/race.hpp"

namespace simt {

extern "C" const char __executable_start[];  // the ELF header

namespace race {
namespace {

// The lines of an address, innermost function first, as "file:line" with what was inlined into what.
std::string lines_of(std::uint32_t offset) {
  // As the program's headers say where it was to be loaded (ELF, e_type): anywhere, or at fixed addresses.
  std::uint16_t type;
  std::memcpy(&type, __executable_start + 16, sizeof(type));
  constexpr std::uint16_t kAnywhere = 3;
  const std::uint64_t start = type == kAnywhere ? 0 : reinterpret_cast<std::uintptr_t>(__executable_start);
  char command[128];
  // The instruction before the return address.
  std::snprintf(command, sizeof(command), "addr2line -i -e /proc/%d/exe 0x%llx", static_cast<int>(getpid()),
                static_cast<unsigned long long>(start + offset - 1));
  std::FILE* const pipe = popen(command, "r");
  if (!pipe) return "";
  std::string text;
  char line[1024];
  for (int kept = 0; kept < 4 && std::fgets(line, sizeof(line), pipe);) {
    if (std::strstr(line, "/emulator/cuda/") || std::strstr(line, "/emulator/toolkit/")) continue;
    const char* part = std::strstr(line, "/src/");
    if (const char* const test = std::strstr(line, "/emulator/")) part = test;
    const std::string place(part ? part + 1 : line);
    text += (kept++ ? " in " : "") + place.substr(0, place.find_first_of(" \n"));
  }
  while (std::fgets(line, sizeof(line), pipe)) continue;
  pclose(pipe);
  return text;
}

}  // namespace

std::string describe_code(std::uint32_t offset) {
  static std::map<std::uint32_t, std::string>& known = *new std::map<std::uint32_t, std::string>;
  const auto [found, is_new] = known.emplace(offset, "");
  if (is_new) found->second = lines_of(offset);
  return found->second.empty() ? "an unknown line" : found->second;
}

bool report_only(std::uint32_t code, std::uint32_t other, const std::string& text) {
  static const char* const mode = std::getenv("FK_EMULATOR_RACES");
  if (!mode || std::strcmp(mode, "list") != 0) return false;
  static auto& pairs = *new std::set<std::pair<std::uint32_t, std::uint32_t>>;
  if (pairs.emplace(code, other).second) std::fprintf(stderr, "%s\n", text.c_str());
  return true;
}

}  // namespace race
}  // namespace simt
