"""Reads the text of a compiled XLA program: its collectives, over which mesh axes, how often, with how many bytes.

`read(compiled.as_text(), mesh.shape)` walks the program from its entry through loops, fusions, calls and async
wrappers, so that traffic per mesh axis can be counted and a budget can be a test. It must not know jax, models or
layouts: text and axis sizes go in, plain records come out. It reads optimised HLO as the CPU and GPU compilers print
it, one instruction a line. Reference: https://openxla.org/xla/operation_semantics
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from math import ceil, prod

_PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "ragged-all-to-all": 1}  # of a ring
_COLLECTIVES = {*_PASSES, "collective-permute", "collective-broadcast", "send"}
_MOVES = {"bitcast", "broadcast", "concatenate", "constant", "convert", "copy", "copy-done", "copy-start", "dynamic-slice",
          "dynamic-update-slice", "get-tuple-element", "iota", "pad", "parameter", "reshape", "reverse", "slice", "transpose", "tuple"}
_MATMULS = {"dot", "convolution", "ragged-dot", "scaled-dot"}  # a TPU program prints matmuls as convolutions


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective as reached from the entry: an instruction reached on two paths is two records.

    `bytes` and `wire_bytes` are per device and run. A permute spans every axis that one of its messages crosses; "send"
    is a permute that the compiler took apart (its "recv" is not counted again).
    """

    op: str  # HLO opcode without "-start": "all-reduce", "all-gather", "reduce-scatter", "collective-permute", ...
    axes: tuple[str, ...]  # in mesh order, without axes of size 1; () for groups of one; ("?",) if no set of axes fits
    dtype: str  # element type; several (a combined collective) are joined by "+"
    bytes: int  # of the full (gathered, unscattered) tensors: the larger of operands and results
    wire_bytes: int  # sent by one device with a ring algorithm; of a permute: by a device that sends
    group_size: int  # devices in one group; of a permute: along its axes
    count: (
        int  # runs in one call of the program, the product of `loops`; a conditional's branches count as always taken
    )
    loops: tuple[int, ...]  # trip counts of the enclosing while loops, outermost first
    overlapped: bool | None  # is a matmul or attention scheduled between start and done? None if synchronous
    name: str  # of the HLO instruction
    source: str  # op_name in its metadata: the path of jax primitives it came from


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums per call of the program: runs, bytes per device, bytes one device sends."""

    count: int
    bytes: int
    wire_bytes: int


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a compiled program runs.

    `custom_calls`: target -> runs in one call of the program. `conditionals`, `dots` and `instructions` count the
    instructions of the text, each once however often it runs. A key of `dots` is "bf16,bf16->f32", followed by a
    precision above default or an algorithm if there is one: "f32,f32->f32 highest". A GPU runs "f32,f32->f32" in TF32.
    `loops`: for each while loop, the trip counts around it, outermost first, and its own last; None if unknown.
    """

    collectives: tuple[Collective, ...]
    custom_calls: dict[str, int]
    conditionals: int
    dots: dict[str, int]
    instructions: int
    loops: tuple[tuple[int | None, ...], ...]

    def totals(self, *keys: str) -> dict[tuple[object, ...], Totals]:
        """Sums by fields of Collective, weighted by count: totals("op", "axes")["all-gather", ("dp",)].wire_bytes."""
        rows: dict[tuple[object, ...], list[int]] = {}
        for c in self.collectives:
            row = rows.setdefault(tuple(getattr(c, key) for key in keys), [0, 0, 0])
            row[:] = row[0] + c.count, row[1] + c.count * c.bytes, row[2] + c.count * c.wire_bytes
        return {key: Totals(count=n, bytes=size, wire_bytes=wire) for key, (n, size, wire) in rows.items()}


def read(text: str | None, mesh_shape: Mapping[str, int], *, unknown_trips: int | None = None) -> Program:
    """Reads a compiled program.

    Args:
      text: what `compiled.as_text()` returns; None, from a backend without text, is an error.
      mesh_shape: axis -> size; device ids in the text are positions in the mesh, row-major over the axes.
      unknown_trips: trip count to assume for loops whose own count the text does not tell.
    Raises:
      ValueError: no HLO; compiled for another number of devices; device groups in an unknown form; or a loop of unknown
        trip count that holds a collective or custom call while `unknown_trips` is None (the message names the loop).
    """
    return _Walk(text or "", mesh_shape, unknown_trips).program()


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What an instruction is: the kernels of a profile carry its name."""

    op: str  # HLO opcode: "fusion", "custom-call", "copy", "all-gather-start", ...
    target: str = ""  # of a custom call
    dot: str = ""  # the matmul that it is or holds, as a key of Program.dots
    moves: bool = False  # it only moves or converts values, and computes none
    source: str = ""  # op_name in its metadata, or the first one inside of a fusion without


def origins(text: str | None) -> dict[str, Origin]:
    """Every instruction of a program's text by name. Raises ValueError like `read`."""
    computations, _ = _computations(text or "")

    def inside(i: _Instruction) -> Iterator[tuple[_Computation, _Instruction]]:
        for name in i.called if i.op in ("fusion", "call", "async-start") else ():
            for part in computations[name].values():
                yield computations[name], part
                yield from inside(part)

    def origin(around: _Computation, i: _Instruction) -> Origin:
        parts = [(around, i), *inside(i)]
        heads = [part for _, part in parts if part.op not in ("fusion", "call")]
        return Origin(op=i.op, target=i.target, dot=next((_dot(c, part) for c, part in parts if part.is_matmul), ""),
                      moves=all(part.op in _MOVES or _is_index(part) for part in heads),
                      source=next((part.source for _, part in parts if part.source), ""))

    return {i.name: origin(c, i) for c in computations.values() for i in c.values()}


def _is_index(i: _Instruction) -> bool:
    """Arithmetic on one whole number or truth value, such as where a slice starts."""
    return bool(re.match(r"(?:[su]\d+|pred)\[\]", i.shape))


@dataclass(frozen=True)
class _Instruction:
    root: str
    name: str
    shape: str
    op: str
    argument: str  # between the parentheses
    attributes: str  # behind them

    @cached_property
    def operands(self) -> list[str]:
        bare = re.sub(r"\[[^\]]*\]|\{[^}]*\}|\([^)]*\)", "", self.argument)  # without shapes, which hold commas too
        parts = bare.split(",") if self.op not in ("constant", "parameter") else []
        return [part.split()[-1].lstrip("%") for part in parts if part.strip()]

    @cached_property
    def called(self) -> list[str]:
        """Names of the computations it calls."""
        if not any(key in self.attributes for key in ("calls=", "to_apply=", "body=", "_computation")):
            return []  # most instructions: without the search below
        plain = re.sub(r'"(?:[^"\\]|\\.)*"', "", self.attributes)
        found = re.findall(r"\b(?:calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)", plain)
        return re.findall(r"[\w.\-]+", " ".join(found))

    def find(self, pattern: str) -> str:
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    @property
    def source(self) -> str:
        return self.find(r'op_name="((?:[^"\\]|\\.)*)"')

    @property
    def target(self) -> str:
        return self.find(r'custom_call_target="([^"]*)"') if self.op == "custom-call" else ""

    @property
    def is_matmul(self) -> bool:
        return self.op in _MATMULS or bool(re.search("gemm|matmul", self.target))


_Computation = dict[str, _Instruction]  # in the order of the text, which is the schedule if the program has one
_Loops = tuple[tuple[str, int | None], ...]  # names and trip counts of the loops around something, outermost first


def _computations(text: str) -> tuple[dict[str, _Computation], str]:
    """All computations by name, and the name of the entry."""
    text, computations, entry = re.sub(r"/\*index=\d+\*/", "", text), {}, ""
    block = re.compile(r"^[ \t]*(ENTRY )?%?([\w.\-]+)[ \t]*(?:\([^\n]*)?\{[ \t]*\n(.*?)^[ \t]*\}", re.M | re.S)
    form = re.compile(r"[ \t]*(ROOT )?%?(\S+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(?:, ([\w\-]+=.*))?[ \t]*")
    for head, name, body in block.findall(text):
        lines = {line: form.fullmatch(line) for line in body.splitlines() if line.strip()}
        if unread := [line for line, match in lines.items() if not match]:
            raise ValueError(f"no instruction: {unread[0].strip()[:200]}")
        computations[name] = {match[2]: _Instruction(*match.groups("")) for match in lines.values() if match}
        entry = name if head else entry
    if not entry:
        raise ValueError("no ENTRY computation: this is not the text of a compiled XLA program")
    return computations, entry


def _root(computation: _Computation) -> str:
    return next(i.name for i in computation.values() if i.root)


def _integers(text: str | None) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text or "")]


def _arrays(shape: str) -> list[tuple[str, int]]:
    """(element type, bytes) of every array in a shape: "(bf16[8]{0}, u32[])" -> [("bf16", 16), ("u32", 4)]."""
    out = []
    for dtype, dims in re.findall(r"([a-z]\w*)\[([\d,<= ]*)\]", shape):
        bits = {"pred": "8", "token": "0", "opaque": "0"}.get(dtype) or re.findall(r"\d+", dtype)[0]
        out.append((dtype, ceil(int(bits) * prod(_integers(dims)) / 8)))
    return out


def _iota(dims: list[int], order: list[int]) -> list[int]:
    """0..n-1 as an array of shape `dims`, transposed to `order` (if not empty), flattened."""
    order = order or list(range(len(dims)))
    strides = [prod(dims[d + 1 :]) for d in order]
    return [sum(i * s for i, s in zip(at, strides, strict=True)) for at in product(*(range(dims[d]) for d in order))]


def _chunks(ids: list[int], size: int) -> list[list[int]]:
    return [ids[i : i + size] for i in range(0, len(ids), size)]


def _groups(attributes: str, num_devices: int) -> list[list[int]]:
    """The groups of a collective, in any of the three forms XLA prints; an empty list of groups means all devices."""
    if found := re.search(r"replica_groups=\{((?:\{[\d, ]*\},? ?)*)\}", attributes):  # {{0,1},{2,3}}
        return [_integers(g) for g in re.findall(r"\{([^}]*)\}", found[1])] or [list(range(num_devices))]
    iota = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=" + iota, attributes):  # [4,2]<=[2,4]T(1,0)
        return _chunks(_iota(_integers(found[2]), _integers(found[3])), int(found[1]))
    found = re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", attributes)
    if not found:
        raise ValueError(f"device groups in an unknown form: {attributes[:200]}")
    # mesh['x'=4,'y'=2], device_ids=([2,2,2]T(0,2,1)) {'x':(2)2,'y'}: groups span y and the minor half of x
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", found[1])}
    order = re.match(iota, found[2] or f"[{prod(sizes.values())}]")
    ids = _iota(_integers(order[1]), _integers(order[2])) if order else _integers(found[2])
    parts = re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?", found[3])
    dims, inside = [], []  # every axis cut into its grouped parts and what lies between; which of these are grouped
    for axis, size in sizes.items():
        done = 1
        for before, part in sorted((int(b or 1), int(p or size)) for name, b, p in parts if name == axis):
            inside.append(len(dims) + 1)
            dims += [before // done, part]
            done = before * part
        dims.append(size // done)
    outside = [d for d in range(len(dims)) if d not in inside]
    return _chunks([ids[i] for i in _iota(dims, outside + inside)], prod(dims[d] for d in inside))


def _dot(computation: _Computation, i: _Instruction) -> str:
    """Key of a matmul in Program.dots."""
    operands = [_arrays(computation[name].shape)[0][0] for name in i.operands[:2]]
    precision = re.findall(r"\w+", i.find(r'operand_precision"?[=:][\[{]([^\]}]*)').lower())
    algorithm = i.find(r'(?:\balgorithm=|"algorithm":")(\w+)').lower()
    extra = [word for word in dict.fromkeys([*precision, algorithm]) if word not in ("", "default", "alg_unset")]
    return " ".join([f"{','.join(operands)}->{_arrays(i.shape)[0][0]}", *extra])


class _Walk:
    def __init__(self, text: str, mesh_shape: Mapping[str, int], unknown_trips: int | None) -> None:
        (self.computations, self.entry), self.unknown_trips = _computations(text), unknown_trips
        self.axes, self.sizes, self.num_devices = list(mesh_shape), list(mesh_shape.values()), prod(mesh_shape.values())
        head = "".join(re.findall(r"HloModule .*", text)[:1])
        self.scheduled = "is_scheduled=true" in head
        compiled_for = prod(map(int, re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", head)))
        if compiled_for not in (1, self.num_devices):
            raise ValueError(f"compiled for {compiled_for} devices, mesh {dict(mesh_shape)} has {self.num_devices}")
        self.collectives: list[Collective] = []
        self.custom_calls: Counter[str] = Counter()
        self.loops: list[tuple[int | None, ...]] = []
        self.hides = cache(lambda name: any(map(self.is_heavy, self.computations[name].values())))

    def is_heavy(self, i: _Instruction) -> bool:
        """Is it, or does it call, a matmul or fused attention?"""
        return i.is_matmul or bool(re.search("fmha|attention", i.target)) or any(map(self.hides, i.called))

    def program(self) -> Program:
        self.visit(self.entry, (), None)
        every = [(c, i) for c in self.computations.values() for i in c.values()]
        return Program(
            collectives=tuple(self.collectives),
            custom_calls=dict(self.custom_calls),
            conditionals=sum(i.op == "conditional" for _, i in every),
            dots=dict(Counter(_dot(c, i) for c, i in every if i.is_matmul)),
            instructions=len(every),
            loops=tuple(self.loops),
        )

    def visit(self, name: str, loops: _Loops, overlapped: bool | None) -> None:
        """Records what one run of a computation does; `overlapped` holds for all of it if it is wrapped as async."""
        computation = self.computations[name]
        for i in computation.values():
            op, inner = i.op.removesuffix("-start"), loops
            window = self.window(computation, i) if i.op.endswith("-start") or op == "send" else overlapped
            if op in _COLLECTIVES:
                if "is_host_transfer=true" not in i.attributes:
                    self.collectives.append(self.collective(computation, i, loops, window))
                continue
            if op == "custom-call" and i.target != "AllocateBuffer":  # memory, where nothing runs
                self.custom_calls[i.target] += prod(self.counted(loops, i))
            if op == "while":
                inner = (*loops, (i.name, self.trips(computation, i)))
                self.loops.append(tuple(trips for _, trips in inner))
            for called in i.called if not op.endswith(("-update", "-done")) else ():  # a start's are theirs again
                self.visit(called, inner, window)

    def counted(self, loops: _Loops, i: _Instruction) -> tuple[int, ...]:
        """Trip counts of the loops around something that is to be counted."""
        counts = []
        for name, trips in loops:
            counts.append(self.unknown_trips if trips is None else trips)
            if counts[-1] is None:
                raise ValueError(f"loop {name}, trip count unknown, holds {i.name} ({i.source}): pass unknown_trips")
        return tuple(counts)

    def collective(self, around: _Computation, i: _Instruction, loops: _Loops, overlapped: bool | None) -> Collective:
        op, done = i.op.removesuffix("-start"), self.done(around, i) if i.op.endswith("-start") else i
        operands = [a for name in i.operands for a in _arrays(around[name].shape) if a[1]]
        results = [b for _, b in _arrays((done or i).shape)] if op != "send" else []
        if not done:  # it is waited for elsewhere, and the shape of the start lists operands and results
            results = [max(results)]
        size = max(sum(b for _, b in operands), sum(results))
        (axes, n), trips = self.span(i, op), self.counted(loops, i)
        return Collective(
            op=op,
            axes=axes,
            dtype="+".join(dict.fromkeys(dtype for dtype, _ in operands)),
            bytes=size,
            wire_bytes=_PASSES[op] * size * (n - 1) // n if op in _PASSES else size * (n > 1),
            group_size=n,
            count=prod(trips),
            loops=trips,
            overlapped=overlapped,
            name=i.name,
            source=i.source,
        )

    def span(self, i: _Instruction, op: str) -> tuple[tuple[str, ...], int]:
        """Mesh axes and group size of a collective."""
        if permute := op in ("collective-permute", "send"):
            groups = _chunks(_integers(i.find(r'source_target_pairs="?(\{[\d{}, ]*\})')), 2)
        else:
            groups = _groups(i.attributes, self.num_devices)
        if groups == [[0]] and "channel_id=" in i.attributes and "use_global_device_ids" not in i.attributes:
            groups = [list(range(self.num_devices))]  # a group of replicas: all their partitions take part
        strides = [prod(self.sizes[d + 1 :]) for d in range(len(self.sizes))]
        places = [[{x // s % n for x in g} for s, n in zip(strides, self.sizes, strict=True)] for g in groups]
        spanned = [d for d in range(len(self.sizes)) if any(len(place[d]) > 1 for place in places)]
        whole = prod(self.sizes[d] for d in spanned)
        n = whole if permute else max(map(len, groups))
        even = n == whole and {len(g) for g in groups} == {n} and n * len(groups) == self.num_devices
        return tuple(self.axes[d] for d in spanned) if permute or even or n == 1 else ("?",), n

    def done(self, computation: _Computation, start: _Instruction) -> _Instruction | None:
        """What waits for an async instruction, if it stands in the same computation."""
        for i in computation.values():
            if start.name in i.operands and i.op.endswith(("-update", "-done")):
                return i if i.op.endswith("-done") else self.done(computation, i)
        return None

    def window(self, computation: _Computation, start: _Instruction) -> bool | None:
        """Does heavy work stand between start and done, or the end of the computation?"""
        if not self.scheduled or start.find(r'"is_sync":\s*(true)'):
            return None
        order, done = list(computation.values()), self.done(computation, start)
        return any(map(self.is_heavy, order[order.index(start) + 1 : order.index(done) if done else None]))

    def trips(self, computation: _Computation, loop: _Instruction) -> int | None:
        """The compiler's note; else what follows if the loop counts from a constant in constant steps; else None."""
        if known := loop.find(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)'):
            return int(known)
        condition, body = (self.computations[loop.find(rf"\b{key}=%?([\w.\-]+)")] for key in ("condition", "body"))
        test = re.fullmatch(r"compareLT #(\d+) (\d+)", self.formula(condition, _root(condition)))
        state, result = computation[loop.operands[0]], body[_root(body)]
        if not test or (state.op, result.op) != ("tuple", "tuple"):
            return None
        index = int(test[1])
        count = f"{self.formula(computation, state.operands[index])} {self.formula(body, result.operands[index])}"
        found = re.fullmatch(rf"(\d+) add (?:#{index} ([1-9]\d*)|([1-9]\d*) #{index})", count)
        return max(0, ceil((int(test[2]) - int(found[1])) / int(found[2] or found[3]))) if found else None

    def formula(self, computation: _Computation, name: str, inputs: tuple[str, ...] = ()) -> str:
        """An instruction as text: "compareLT #0 5" for element 0 of a loop's state < 5, in or outside of a fusion."""
        i = computation[name]
        if i.op == "constant" or (i.op == "parameter" and inputs):
            return i.argument if i.op == "constant" else inputs[int(i.argument)]
        if i.op == "get-tuple-element" and computation[i.operands[0]].op == "parameter":
            return "#" + i.find(r"\bindex=(\d+)")
        follow = i.op in ("add", "bitcast", "compare", "copy", "fusion")
        terms = tuple(self.formula(computation, operand, inputs) for operand in i.operands if follow)
        if i.op == "fusion" and (inside := self.computations[i.called[0]]):
            return self.formula(inside, _root(inside), terms)
        return " ".join([i.op + i.find(r"\bdirection=(\w+)"), *terms]) if i.op not in ("copy", "bitcast") else terms[0]
