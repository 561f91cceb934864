"""Writes what follows from the headers: the ops of the C API, and its mirror in Rust. Run it when an op is added.

    python -m tools.c_api            writes the files
    python -m tools.c_api --check    fails where one of them is out of date

An op's C function comes from its C++ declaration (which ops there are says src/ops/op_list.hpp), so no op can lack it.
Types, options and handles are written by hand in flashkernel_types.h and flashkernel.h: they are the ABI.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from . import comments

ROOT = Path(__file__).resolve().parents[1]
# Functions of kv_ops.hpp that are no op: another form of kv_append, and the numbers that check_block_table throws.
MORE_FUNCTIONS = ("kv_append_to_sequences", "find_bad_page")
PROMISED = "tests_cpp/c_api/functions.txt"
GLUE = "~"  # a space at which no line is broken
MADE = "Made by tools/c_api.py"

# C++ parameter types: the C type, and the member of `Call` (src/c/call.hpp) that converts it; "" passes it as it is.
TYPES = {
    "const TensorView&": ("const fk_tensor*", "tensor"),
    "const ExecutionContext&": ("const fk_context*", "context"),
    "const AttentionOptions&": ("const fk_attention_options*", "attention_options"),
    "const AttentionGradients&": ("const fk_attention_gradients*", "attention_gradients"),
    "const RopeOptions&": ("const fk_rope_options*", "rope_options"),
    "const std::optional<KvAppendRope>&": ("const fk_kv_append_rope*", "kv_append_rope"),
    "const KvAppendPlaces&": ("const fk_kv_append_places*", "kv_append_places"),
    "const KvScales&": ("const fk_kv_scales*", "kv_scales"),
    "const NormSaved&": ("const fk_norm_saved*", "norm_saved"),
    "const NormGradients&": ("const fk_norm_gradients*", "norm_gradients"),
    "const LinearGradients&": ("const fk_linear_gradients*", "linear_gradients"),
    "const CrossEntropyOptions&": ("const fk_cross_entropy_options*", "cross_entropy_options"),
    "const LinearCrossEntropyOptions&": ("const fk_linear_cross_entropy_options*", "linear_cross_entropy_options"),
    "Activation": ("fk_activation", "activation"),
    "WeightFormat": ("fk_weight_format", "weight_format"),
    "std::int64_t": ("int64_t", ""),
    "AxisMask": ("uint32_t", ""),
    "bool": ("int32_t", "flag"),
    "int": ("int32_t", ""),
    "float": ("float", ""),
    "double": ("double", ""),
}
WORDS = {
    r"\bInvalidArgument\b": "FK_INVALID_ARGUMENT",
    r"\bBadBlockTable\b": "FK_BAD_BLOCK_TABLE",
    r"\bUnsupported\b": "FK_UNSUPPORTED",
    r"\bAttentionOptions::": "fk_attention_options.",
    r" \(kv_scales\.hpp\)": "",
    r"\boptions\.": "options->",
    r"\bcontext\.": "context->",
    r"\bThrows\b": "Returns",
    r"\bthrow\b": "return",
}


class Function(NamedTuple):
    name: str
    header: str
    parameters: list[tuple[str, str]]  # C++ type, name
    comment: list[str]  # paragraphs and items of lists


def op_names() -> list[str]:
    """The public functions of all ops, in the order of the list."""
    text = (ROOT / "src" / "ops" / "op_list.hpp").read_text(encoding="utf-8")
    return [name for op in re.findall(r"Op<\w+Params>\{\{([^}]*)\}\}", text) for name in re.findall(r'"(\w+)"', op)]


def split_parameters(text: str) -> list[tuple[str, str]]:
    parameters = []
    for part in text.replace("\n", " ").split(","):
        found = re.fullmatch(r"\s*(.*?)\s*\b(\w+)(?:\s*=.*)?\s*", part)
        assert found, f"no parameter: {part!r}"
        parameters.append((re.sub(r"\s+", " ", found[1]), found[2]))
    return parameters


def declarations() -> dict[str, list[Function]]:
    """Every function of the C++ headers that returns nothing, with its overloads, in the order of the text."""
    pattern = re.compile(r"((?:^///[^\n]*\n)*)^FK_API void (\w+)\(([^;]*)\);", re.MULTILINE)
    found: dict[str, list[Function]] = {}
    for path in sorted((ROOT / "include" / "flashkernel").glob("*.hpp")):
        for comment, name, parameters in pattern.findall(path.read_text(encoding="utf-8")):
            said = comments.paragraphs(line[3:] for line in comment.splitlines())
            found.setdefault(name, []).append(Function(name, path.name, split_parameters(parameters), said))
    return found


def ops() -> list[Function]:
    """One function an op: of overloads the longest, which serves the others' calls with its arguments left out."""
    known, result = declarations(), list[Function]()
    for name in (*op_names(), *MORE_FUNCTIONS):
        overloads = known.get(name)
        if not overloads:
            sys.exit(f"tools/c_api.py: no header declares 'FK_API void {name}('")
        longest = max(overloads, key=lambda f: len(f.parameters))
        for kind, parameter in longest.parameters:
            if kind not in TYPES:
                sys.exit(f"tools/c_api.py: {name}: '{parameter}' is a {kind}, which has no C type: add a struct to "
                         "flashkernel_types.h, its conversion to src/c/call.hpp and a line to TYPES here")  # fmt: skip
        comment = [part for f in overloads for part in f.comment]
        result.append(longest._replace(comment=comment or [f"As fk_{result[-1].name}."]))
    return result


def filled(text: str, width: int, first: str, others: str) -> str:
    """Breaks lines at spaces, but not where GLUE stands for one."""
    text = textwrap.fill(text, width, initial_indent=first, subsequent_indent=others, break_long_words=False)
    return text.replace(GLUE, " ")


def in_c(comment: str, function: Function, names: set[str]) -> str:
    """The comment of a C++ declaration in C's words."""
    for word, c_word in WORDS.items():
        comment = re.sub(word, c_word, comment)
    kinds = [kind for kind, _ in function.parameters]
    group = "ACTIVATION" if "Activation" in kinds else "REDUCTION"
    comment = re.sub(r"\bk(None|Sum|Mean)\b", lambda m: f"FK_{group}_{m[1].upper()}", comment)
    return re.sub(r"`(\w+)`", lambda m: f"fk_{m[1]}" if m[1] in names else f"`{m[1]}`", comment)


def comment(parts: list[str], function: Function, names: set[str]) -> str:
    return comments.wrapped((in_c(part, function, names) for part in parts), "//", 118)


def declaration(function: Function) -> str:
    head = f"fk_status fk_{function.name}("
    parameters = [f"{TYPES[kind][0]} {name}".replace(" ", GLUE) for kind, name in function.parameters]
    return filled(head.replace(" ", GLUE) + ", ".join(parameters), 112, "", "    ") + ")"


def c_header(functions: list[Function]) -> str:
    out = [f"""// The ops of the C API: kernels on borrowed tensors, forward and backward. {MADE}.
//
// Shapes, dtypes and edge cases are those of the C++ functions with the same names. A tensor that may be absent is
// NULL, and so are options and a context that are the defaults. Each function returns FK_INVALID_ARGUMENT for
// arguments that do not fit, FK_UNSUPPORTED where no kernel serves them on their device, FK_OUT_OF_MEMORY where there
// is no workspace, FK_CUDA_ERROR where CUDA fails; nothing is written then, but for what CUDA had begun. Work on a GPU
// is queued on context->stream: the call does not wait for it.
#pragma once

#include "flashkernel/flashkernel_types.h"

#ifdef __cplusplus
extern "C" {{
#endif
"""]  # fmt: skip
    names, header = {f.name for f in functions}, ""
    for function in functions:
        if function.header != header:
            header = function.header
            text = (ROOT / "include" / "flashkernel" / header).read_text(encoding="utf-8")
            about = comments.paragraphs(line[2:] for line in text[: text.index("#pragma once")].splitlines())
            out.append(comment(about, function, names).replace("// ", "// ---- ", 1) + "\n")
        out.append(comment(function.comment, function, names))
        out.append(f"FK_API {declaration(function)};\n")
    out.append("#ifdef __cplusplus\n}\n#endif\n")
    return "\n".join(out)


def c_source(functions: list[Function]) -> str:
    out = [f"""// The ops of the C API: arguments become those of the C++ functions, exceptions become status codes.
// {MADE}.
// clang-format off
#include "flashkernel/flashkernel_ops.h"

#include "c/call.hpp"
"""]  # fmt: skip
    out += [f'#include "flashkernel/{header}"' for header in sorted({f.header for f in functions})]
    out.append("\nusing flashkernel::c::Call;\nusing flashkernel::c::guarded;\n")
    for function in functions:
        arguments = [
            f'c.{TYPES[kind][1]}("{name}",{GLUE}{name})' if TYPES[kind][1] else name
            for kind, name in function.parameters
        ]
        call = f"flashkernel::{function.name}(" + ", ".join(arguments)
        out.append(f'{declaration(function)} {{\n  return guarded([&] {{\n    const Call c("{function.name}");')
        out.append(filled(call, 116, "    ", "        ") + ");\n  });\n}\n")
    return "\n".join(out).rstrip() + "\n"


# --- what is read out of the C headers


class Struct(NamedTuple):
    name: str
    fields: list[tuple[str, str, int]]  # C type, name, entries of an array or 0


class CApi(NamedTuple):
    integers: list[str]
    constants: list[tuple[str, int, str]]  # name, value, type
    opaque: list[str]
    structs: list[Struct]
    functions: list[tuple[str, str, list[tuple[str, str]]]]  # returned type, name, parameters


def c_parameters(text: str) -> list[tuple[str, str]]:
    return [] if text.strip() == "void" else [(kind, name) for kind, name in split_parameters(text)]


def c_api(ops_header: str) -> CApi:
    folder = ROOT / "include" / "flashkernel"
    texts = [(folder / "flashkernel_types.h").read_text(encoding="utf-8"), ops_header]
    texts.append((folder / "flashkernel.h").read_text(encoding="utf-8"))
    text = re.sub(r"//[^\n]*", "", "\n".join(texts))
    constants, kind = [], "int32_t"
    for found in re.finditer(r"typedef int32_t (\w+);|enum \{([^}]*)\};", text):
        kind = found[1] or kind
        if found[2]:
            own = kind if "FK_MAX_DIMS" not in found[2] and "FK_ABI" not in found[2] else "int32_t"
            constants += [(n, int(v), own) for n, v in re.findall(r"(\w+) = (\d+)", found[2])]
    structs = []
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\n\} \1;", text, re.DOTALL):
        fields = []
        for line in body.split(";"):
            line = re.sub(r"\s+", " ", line).strip()
            callback = re.fullmatch(r"(.*)\(\*(\w+)\)\((.*)\)", line)
            field = re.fullmatch(r"(.*?) ?\b(\w+)(?:\[(\d+)\])?", line)
            if callback:
                fields.append((f"{callback[1].strip()}({callback[3]})", callback[2], 0))
            elif line:
                assert field, line
                fields.append((field[1], field[2], int(field[3] or 0)))
        structs.append(Struct(name, fields))
    functions = [
        (kind.strip(), name, c_parameters(parameters))
        for kind, name, parameters in re.findall(r"FK_API ([\w ]+?\**) ?(fk_\w+)\(([^;]*)\);", text)
    ]
    opaque = re.findall(r"typedef struct (\w+) \1;", text)
    return CApi(re.findall(r"typedef int32_t (\w+);", text), constants, opaque, structs, functions)


def layout_source(api: CApi) -> str:
    """A C program that prints the size of every struct and the offset of every field."""
    out = [f"// Prints the layout of the C API's structs; c_abi.cmake compares it. {MADE}.",
           "#include <stdio.h>\n", '#include "flashkernel/flashkernel.h"\n', "int main(void) {"]  # fmt: skip
    for struct in api.structs:
        out.append(f'  printf("{struct.name} %u\\n", (unsigned)sizeof({struct.name}));')
        out += [
            f'  printf("{struct.name}.{name} %u\\n", (unsigned)offsetof({struct.name}, {name}));'
            for _, name, _ in struct.fields
        ]
    return "\n".join([*out, "  return 0;", "}", ""])


RUST = {"int32_t": "i32", "uint32_t": "u32", "int64_t": "i64", "uint64_t": "u64", "size_t": "usize", "float": "f32",
        "double": "f64", "void": "c_void", "char": "c_char"}  # fmt: skip


def rust_type(kind: str) -> str:
    callback = re.fullmatch(r"(.*?)\((.*)\)", kind)
    if callback:
        parameters = ", ".join(f"{name}: {rust_type(k)}" for k, name in split_parameters(callback[2]))
        result = "" if callback[1] == "void" else f" -> {rust_type(callback[1])}"
        return f'Option<unsafe extern "C" fn({parameters}){result}>'
    if kind.endswith("*"):
        inner = kind[:-1].strip()
        constant = inner.startswith("const ")
        return f"*{'const' if constant else 'mut'} {rust_type(inner.removeprefix('const '))}"
    return RUST.get(kind, kind)


def rust(api: CApi) -> str:
    out = [f"// The C API as Rust sees it: flashkernel.h, line by line. {MADE}.", ""]
    out += [f"pub type {name} = i32;" for name in api.integers] + [""]
    out += [f"pub const {name}: {rust_type(kind)} = {value};" for name, value, kind in api.constants] + [""]
    for name in api.opaque:
        out += ["#[repr(C)]", f"pub struct {name} {{", "    _private: [u8; 0],",
                "    _not_send: PhantomData<*mut c_void>,", "}", ""]  # fmt: skip
    for struct in api.structs:
        traits = "Clone, Copy" + (", Debug, PartialEq, Eq, Hash" if struct.name in ("fk_device", "fk_sequence") else "")
        out += ["#[repr(C)]", f"#[derive({traits})]", f"pub struct {struct.name} {{"]
        for kind, name, entries in struct.fields:
            field = f"[{rust_type(kind)}; {entries}]" if entries else rust_type(kind)
            out.append(f"    pub {'type_' if name == 'type' else name}: {field},")
        out += ["}", ""]
    out.append('extern "C" {')
    for kind, name, parameters in api.functions:
        arguments = ", ".join(f"{'type_' if n == 'type' else n}: {rust_type(k)}" for k, n in parameters)
        result = "" if kind == "void" else f" -> {rust_type(kind)}"
        out.append(f"    pub fn {name}({arguments}){result};")
    return "\n".join([*out, "}", ""])


def abi_text(api: CApi) -> str:
    """Every function of the C API with its types, one a line: what tests_cpp/c_api/functions.txt is held to."""
    lines = [
        f"{kind} {name}({', '.join(k for k, _ in parameters) or 'void'})" for kind, name, parameters in api.functions
    ]
    return "\n".join(sorted(lines, key=lambda line: line.split("fk_", 1)[1])) + "\n"


def files() -> dict[str, str]:
    functions = ops()
    header = c_header(functions)
    api = c_api(header)
    return {
        "include/flashkernel/flashkernel_ops.h": header,
        "src/c/ops.cpp": c_source(functions),
        "tests_cpp/c_api/layout.c": layout_source(api),
        PROMISED: abi_text(api),
        "bindings/rust/flashkernel-sys/src/ffi.rs": rust(api),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file is out of date")
    check = parser.parse_args().check
    stale = []
    for name, text in files().items():
        path = ROOT / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        broken = set(path.read_text(encoding="utf-8").splitlines()) - set(text.splitlines()) if name == PROMISED else ()
        if broken:
            sys.exit("tools/c_api.py: the C API has lost what it promised; raise FK_ABI_VERSION and the SONAME, and "
                     f"take these lines out of {PROMISED}:\n" + "\n".join(sorted(broken)))  # fmt: skip
        if not check and path.parent.is_dir():
            path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{name} {'is out of date: python -m tools.c_api' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
