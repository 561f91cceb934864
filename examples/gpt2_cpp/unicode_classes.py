"""Writes unicode_classes.hpp: the characters that GPT-2's pattern calls letters, numbers and white space."""

import sys
import unicodedata

SPACES = {9, 10, 11, 12, 13, 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}


def ranges(belongs):
    found = []
    for code in range(sys.maxunicode + 1):
        if belongs(code):
            if found and found[-1][1] == code - 1:
                found[-1][1] = code
            else:
                found.append([code, code])
    return found


def table(name, belongs):
    lines, line = [], ""
    for first, last in ranges(belongs):
        entry = f"{{0x{first:X}, 0x{last:X}}}, "
        if len(line) + len(entry) > 118:
            lines.append(line.rstrip())
            line = ""
        line += entry
    lines.append(line.rstrip().rstrip(","))
    return f"inline constexpr CodeRange {name}[] = {{\n" + "\n".join("    " + part for part in lines) + "};\n"


def header():
    return (
        "// Ranges of code points by Unicode category, sorted. Written by unicode_classes.py; used by tokenizer.hpp.\n"
        f"// Unicode {unicodedata.unidata_version}.\n"
        "#pragma once\n\n#include <cstdint>\n\nnamespace gpt2 {\n\n"
        "struct CodeRange {\n  std::uint32_t first, last;\n};\n\n// clang-format off\n"
        + table("kSpaces", SPACES.__contains__)
        + "\n"
        + table("kLetters", lambda code: unicodedata.category(chr(code)).startswith("L"))
        + "\n"
        + table("kNumbers", lambda code: unicodedata.category(chr(code)).startswith("N"))
        + "// clang-format on\n\n}  // namespace gpt2\n"
    )


if __name__ == "__main__":
    sys.stdout.write(header())
