// Linked where the kernels are compiled with -fsanitize=thread: races are looked for.
#include "simt/race.hpp"

namespace simt::race {
static const bool on = enabled = true;
}  // namespace simt::race
