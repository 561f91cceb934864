// FK_API marks what the shared library exports; everything else stays hidden.
#pragma once

#if defined(FLASHKERNEL_STATIC)
#define FK_API
#elif defined(_WIN32)
#if defined(FLASHKERNEL_BUILD)
#define FK_API __declspec(dllexport)
#else
#define FK_API __declspec(dllimport)
#endif
#else
#define FK_API __attribute__((visibility("default")))
#endif
