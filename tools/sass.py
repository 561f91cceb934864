"""Reads NVIDIA machine code as nvdisasm prints it: basic blocks, the main loop, and the path through it that whole,
unmasked tiles take. Used by the model of sm_model.py; nothing here runs code or needs a GPU.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Instruction", "functions", "main_loop", "mix", "registers_used"]

MATRIX = ("HMMA", "IMMA")
ENDS_BLOCK = ("BRA", "EXIT", "RET", "CALL", "BRX", "JMP", "BREAK", "BSYNC")
NEVER = 10**9


@dataclass(frozen=True)
class Instruction:
    opcode: str  # "HMMA.1688.F32"
    operands: tuple[str, ...]
    predicate: str = ""  # "P0"; "" if it always runs

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def width(self) -> int:
        """Bits that a load or store moves for each thread."""
        match = re.search(r"\.(128|64|U16|S16|U8|S8)(?:\.|$)", self.opcode)
        return {"128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}[match[1]] if match else 32

    @property
    def matrices(self) -> int:
        """Matrices of 8 x 8 that LDSM loads."""
        match = re.search(r"\.(\d)$", self.opcode)
        return int(match[1]) if match else 1

    def writes(self) -> set[str]:
        if self.name in ("ST", "STS", "STG", "STL", "BAR", "BRA", "BSSY", "BSYNC", "EXIT", "NOP", "RED", "WARPSYNC"):
            return set()
        found: set[str] = set()
        for at, operand in enumerate(self.operands[: 2 if "P" in self.operands[0][:2] else 1] if self.operands else ()):
            found |= _registers(operand, self._count(at))
        if self.name in ("ISETP", "FSETP", "PLOP3", "IADD3", "LEA", "LOP3"):  # carries and second results
            found |= {x for x in self.operands[1:3] if re.fullmatch(r"P\d", x)}
        return found

    def reads(self) -> set[str]:
        found = {self.predicate} if self.predicate else set()
        stores = self.name in ("STS", "STG", "ST", "STL")
        for at, operand in enumerate(self.operands):
            if at == 0 and not stores and self.name not in ("BRA", "BAR", "RED"):
                continue
            found |= _registers(operand, self._count(at))
        return found

    def _count(self, at: int) -> int:
        """Consecutive registers that operand `at` stands for."""
        if self.name == "HMMA":
            deep = ".16816." in self.opcode + "."
            return (4, 4 if deep else 2, 2 if deep else 1, 4)[at] if at < 4 else 1
        if self.name == "LDSM":
            return self.matrices if at == 0 else 1
        if self.name in ("LDS", "LDG", "LD", "LDL"):
            return max(1, self.width // 32) if at == 0 else 2 if self.name == "LDG" else 1
        if self.name in ("STS", "STG", "ST", "STL"):
            return max(1, self.width // 32) if at == 1 else 2 if self.name == "STG" else 1
        if self.opcode.startswith("IMAD.WIDE"):
            return 2 if at in (0, 3) else 1
        return 1


def _registers(operand: str, count: int) -> set[str]:
    found: set[str] = set()
    for kind, number in re.findall(r"\b(UR|R|UP|P)(\d+)\b", operand):
        found |= {f"{kind}{int(number) + i}" for i in range(count if kind == "R" else 1)}
    return found


@dataclass
class _Block:
    instructions: list[Instruction] = field(default_factory=list)
    next: list[int] = field(default_factory=list)


def functions(text: str) -> dict[str, list[_Block]]:
    """The basic blocks of every function in the output of `nvdisasm -c` (or `cuobjdump -sass`), by its mangled name."""
    found: dict[str, list[_Block]] = {}
    name = ""
    lines: list[str] = []
    for line in text.splitlines():
        start = re.match(r"\.text\.(\S+):|\s*Function : (\S+)", line)
        if start or line.startswith("\t.section"):
            if name:
                found[name] = _blocks(lines)
            name, lines = (start[1] or start[2]) if start else "", []
        elif name:
            lines.append(line)
    if name:
        found[name] = _blocks(lines)
    return found


def _blocks(lines: Iterable[str]) -> list[_Block]:
    blocks: list[_Block] = []
    targets: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    waiting: list[str] = []
    fresh = True
    for line in lines:
        if label := re.match(r"(\.L\w*):", line):
            waiting.append(label[1])
            fresh = True
            continue
        code = re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line)
        if not code:
            continue
        if fresh:
            blocks.append(_Block())
            targets |= dict.fromkeys(waiting, len(blocks) - 1)
            waiting, fresh = [], False
        operands = tuple(x.strip() for x in re.split(r",\s*(?![^\[]*\])", code[4]) if x.strip())
        made = Instruction(code[3], operands, (code[2] or "").lstrip("!"))
        blocks[-1].instructions.append(made)
        if made.name in ENDS_BLOCK:
            fresh = True
            conditional = bool(made.predicate) or (made.name == "BRA" and len(operands) > 1)
            if made.name == "BRA" and (jump := re.search(r"(\.L\w+)", code[4])):
                jumps.append((len(blocks) - 1, jump[1]))
            if conditional or made.name not in ("BRA", "EXIT", "RET"):
                blocks[-1].next.append(len(blocks))
    for at, block in enumerate(blocks):
        if block.instructions[-1].name not in ENDS_BLOCK:
            block.next.append(at + 1)
    for at, target in jumps:
        if target in targets:
            blocks[at].next.append(targets[target])
    for block in blocks:
        block.next = [at for at in dict.fromkeys(block.next) if at < len(blocks)]
    return blocks


def _components(blocks: list[_Block], inside: set[int]) -> list[list[int]]:
    """Strongly connected components of the graph restricted to `inside` (Tarjan), those that are loops."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    found: list[list[int]] = []

    def visit(root: int) -> None:
        work: list[tuple[int, int]] = [(root, 0)]
        while work:
            at, edge = work.pop()
            if edge == 0:
                index[at] = low[at] = len(index)
                stack.append(at)
            followers = [x for x in blocks[at].next if x in inside]
            descended = False
            for i in range(edge, len(followers)):
                to = followers[i]
                if to not in index:
                    work += [(at, i + 1), (to, 0)]
                    descended = True
                    break
                if to in stack:
                    low[at] = min(low[at], low[to])
            if descended:
                continue
            if low[at] == index[at]:
                component = []
                while True:
                    component.append(stack.pop())
                    if component[-1] == at:
                        break
                if len(component) > 1 or at in blocks[at].next:
                    found.append(component)
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[at])

    for start in sorted(inside):
        if start not in index:
            visit(start)
    return found


def _weight(block: _Block) -> int:
    return sum(x.name in MATRIX for x in block.instructions)


def main_loop(blocks: list[_Block]) -> list[Instruction]:
    """The instructions of one turn of the loop that holds most matrix instructions, on its usual path.

    That path passes every block with matrix instructions, leaves inner loops out, takes the branches that move whole
    vectors of 16 bytes, and is otherwise the shortest: masks, rescaling and searches for NaN are rare branches.
    """
    loops = _components(blocks, set(range(len(blocks))))
    if not loops:
        raise ValueError("sass: no loop in this function")
    loop = set(max(loops, key=lambda found: sum(_weight(blocks[at]) for at in found)))
    if not any(_weight(blocks[at]) for at in loop):
        raise ValueError("sass: no loop with matrix instructions in this function")
    entered = {to for at, block in enumerate(blocks) if at not in loop for to in block.next if to in loop}
    head = min(entered) if entered else min(loop)
    # Without the edges back to the head what is still a loop is an inner one.
    body = loop - {head}
    inner = {at for component in _components(blocks, body) for at in component}
    if any(_weight(blocks[at]) for at in inner):
        raise ValueError("sass: matrix instructions in an inner loop; this reader knows one level")
    usable = loop - inner

    # Longest path by score over the acyclic rest, from the head to a block that goes back to it.
    order: list[int] = []
    seen: set[int] = set()

    def sort(root: int) -> None:
        work: list[tuple[int, bool]] = [(root, False)]
        while work:
            at, done = work.pop()
            if done:
                order.append(at)
            elif at not in seen:
                seen.add(at)
                work.append((at, True))
                work += [(to, False) for to in blocks[at].next if to in usable and to != head]

    sort(head)
    best: dict[int, tuple[int, int | None]] = {}
    for at in order:  # followers come first
        instructions = blocks[at].instructions
        cleans = any(x.name == "LDS" for x in instructions)  # rewrites what it has read: rare
        vectors = 0 if cleans else sum(x.name in ("LDG", "STS") and x.width == 128 for x in instructions)
        score = 10**6 * _weight(blocks[at]) + 1000 * vectors - len(instructions)
        choices: list[tuple[int, int | None]] = [
            (best[to][0], to) for to in blocks[at].next if to in best and to != head and best[to][0] > -NEVER
        ]
        if head in blocks[at].next:
            choices.append((0, None))
        follower = max(choices, key=lambda choice: choice[0]) if choices else (-2 * NEVER, None)
        best[at] = follower[0] + score, follower[1]
    path: list[Instruction] = []
    here: int | None = head
    while here is not None:
        path += blocks[here].instructions
        here = best[here][1]
    if sum(x.name in MATRIX for x in path) != sum(_weight(blocks[at]) for at in loop):
        raise ValueError("sass: no path of the main loop passes all of its matrix instructions")
    return path


def mix(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Count of each opcode without its modifiers; matrix and memory instructions keep what tells their size."""
    counts: Counter[str] = Counter()
    for x in instructions:
        key = x.name
        if key in MATRIX:
            key = x.opcode
        elif key == "LDSM":
            key = f"LDSM.{x.matrices}"
        elif key in ("LDS", "STS", "LDG", "STG"):
            key = f"{key}.{x.width}"
        elif x.opcode.startswith("IMAD.MOV"):
            key = "IMAD.MOV"
        counts[key] += 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def registers_used(log: str) -> dict[str, int]:
    """Registers of every kernel from the report of `ptxas -v`."""
    found: dict[str, int] = {}
    name = ""
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)'", line):
            name = match[1]
        elif name and (match := re.search(r"Used (\d+) registers", line)):
            found[name] = int(match[1])
    return found
