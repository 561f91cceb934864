// From which size on a backward pass does not trust an LSE in fp32 alone.
#pragma once

namespace flashkernel {

/// From this size on an LSE in fp32 is off by 2^-12 and more, and exp(x - LSE) with it: a backward pass adds the
/// exponentials of such a row up again (attention in calls with a bias, whose -1e9 or -3.4e38 hides whole rows).
inline constexpr float kLargeLse = 4096.0f;

/// From here on it is off by up to 2^-7, and where nobody can add a row up again its gradient is NaN instead of wrong.
inline constexpr float kLostLse = 131072.0f;

}  // namespace flashkernel
