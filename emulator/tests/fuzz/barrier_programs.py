# SPDX-License-Identifier: Apache-2.0
"""Random programs in which lanes part, meet and wait for one another, and a model of what they must leave.

A program is a tree of statements over one 32-bit variable a thread, ``x``. Each says itself twice: as PTX (``ptx``),
and as what one thread does (``thread``, a generator that yields where the thread may wait). The model knows threads,
not warps that run in lockstep: any thread that does not wait may be the next to move, so nothing of the emulator's
fragments and meeting points is in it. Barriers are those of PTX ISA 9.0, 9.7.13.1 and 9.7.13.2, in legal use only:
aligned ones where all lanes of a warp that have not exited execute them, the others anywhere. Values go from thread to
thread through shared memory with a barrier before and behind, so that a program has one result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field

MASK = 2**32 - 1
Steps = Generator[tuple[object, ...], int, None]
Lanes = dict[int, int]  # warp: mask of its lanes that execute a statement


class Thread:
    def __init__(self, tid: int) -> None:
        self.tid, self.lane, self.warp, self.x = tid, tid % 32, tid // 32, (tid * 2654435761 + 12345) & MASK


@dataclass
class Emitter:
    """Labels and predicates of one program's text, and code that is put behind its end."""

    names: int = 0
    far: list[str] = field(default_factory=list)

    def dead(self) -> str:
        """A branch that nobody takes, to an exit of its own: what parted before it meets at the kernel's end only."""
        out = self.name("L")
        self.far.append(f"{out}: exit;\n")
        return f"@%dead bra {out};\n"

    def name(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}{self.names}"


def mask_register(masks: Lanes) -> tuple[str, str]:
    """Text that sets %m to the lanes of the thread's own warp, and the operand to name them."""
    values = set(masks.values())
    if len(values) == 1:
        return "", f"{values.pop():#x}"
    text = "".join(f"setp.eq.u32 %t, %wp, {warp}; @%t mov.u32 %m, {mask:#x};\n" for warp, mask in masks.items())
    return text, "%m"


@dataclass
class Local:
    """x of this thread alone, for a while."""

    factor: int
    turns: int  # of a loop whose length differs from lane to lane; 0: no loop
    dead: bool  # with an exit that nobody takes

    def ptx(self, e: Emitter) -> str:
        step = f"mad.lo.u32 %x, %x, {self.factor}, %tid;\n"
        if not self.turns:
            return step
        again, out = e.name("L"), e.name("L")
        dead = e.dead() if self.dead else ""
        return (
            f"and.b32 %n, %x, {self.turns};\n{again}: setp.eq.u32 %t, %n, 0; @%t bra {out};\n{dead}"
            f"{step}sub.u32 %n, %n, 1; bra {again};\n{out}:\n"
        )

    def thread(self, t: Thread) -> Steps:
        for _ in range(t.x & self.turns if self.turns else 1):
            t.x = (t.x * self.factor + t.tid) & MASK
        yield ("step",)


@dataclass
class Exchange:
    """Every thread gives x to another one of its group: barrier, store, barrier, load."""

    barrier: Callable[[], Barrier]
    slots: int  # first word of the words that this statement has for itself
    partner: dict[int, int]
    table: int  # byte offset of `partner` in the input

    def __post_init__(self) -> None:
        self.before, self.behind = self.barrier(), self.barrier()

    def ptx(self, e: Emitter) -> str:
        return (
            f"{self.before.ptx(e)}st.shared.u32 [%own+{4 * self.slots}], %x;\n{self.behind.ptx(e)}"
            f"ld.global.u32 %n, [%partners+{self.table}]; add.u32 %n, %n, %area; ld.shared.u32 %n, [%n+{4 * self.slots}];\n"
            "mad.lo.u32 %x, %x, 31, %n;\n"
        )

    def thread(self, t: Thread) -> Steps:
        yield from self.before.thread(t)
        yield ("store", self.slots + t.tid, t.x)
        yield from self.behind.thread(t)
        got = yield ("load", self.slots + self.partner[t.tid])
        t.x = (t.x * 31 + got) & MASK


@dataclass
class Barrier:
    """``kind``: sync, arrive, popc, and, or, warp; ``count``: threads, 0: all of the block."""

    kind: str
    number: int = 0
    count: int = 0
    aligned: bool = True
    masks: Lanes = field(default_factory=dict)  # of the warp form

    def ptx(self, e: Emitter) -> str:
        if self.kind == "warp":
            text, mask = mask_register(self.masks)
            return f"{text}bar.warp.sync {mask};\n"
        count = f", {self.count}" if self.count else ""
        name = "bar" if self.aligned else "barrier"
        if self.kind in ("sync", "arrive"):
            return f"{name}.{self.kind} {self.number}{count};\n"
        test = "and.b32 %n, %x, 4; setp.ne.u32 %t, %n, 0;\n"
        if self.kind == "popc":
            return f"{test}{name}.red.popc.u32 %n, {self.number}{count}, %t; add.u32 %x, %x, %n;\n"
        return f"{test}{name}.red.{self.kind}.pred %t, {self.number}{count}, %t; @%t add.u32 %x, %x, 77;\n"

    def thread(self, t: Thread) -> Steps:
        if self.kind == "warp":
            yield ("warp", self.masks[t.warp])
            return
        result = yield ("barrier", self.kind, self.number, self.count, t.x & 4 != 0)
        if self.kind == "popc":
            t.x = (t.x + result) & MASK
        elif self.kind in ("and", "or") and result:
            t.x = (t.x + 77) & MASK


@dataclass
class Branch:
    """Threads for which ``holds`` execute ``then``, the others ``otherwise``. ``test`` sets %t."""

    test: str
    holds: Callable[[Thread], bool]
    then: list
    otherwise: list
    dead: int  # 1, 2, 3: an exit that nobody takes in the one, the other, both
    far: bool  # `then` stands behind the kernel's end

    def ptx(self, e: Emitter) -> str:
        then, end = e.name("L"), e.name("L")
        first = (e.dead() if self.dead & 1 else "") + text(self.then, e)
        second = (e.dead() if self.dead & 2 else "") + text(self.otherwise, e)
        if self.far:
            e.far.append(f"{then}: {first}bra {end};\n")
            return f"{self.test} @%t bra {then};\n{second}{end}:\n"
        return f"{self.test} @%t bra {then};\n{second}bra {end};\n{then}: {first}{end}:\n"

    def thread(self, t: Thread) -> Steps:
        for statement in self.then if self.holds(t) else self.otherwise:
            yield from statement.thread(t)


@dataclass
class Loop:
    """A loop with the same number of turns in every thread."""

    turns: int
    counter: str
    body: list

    def ptx(self, e: Emitter) -> str:
        again = e.name("L")
        return (
            f"mov.u32 {self.counter}, {self.turns};\n{again}:\n{text(self.body, e)}"
            f"sub.u32 {self.counter}, {self.counter}, 1; setp.ne.u32 %t, {self.counter}, 0; @%t bra {again};\n"
        )

    def thread(self, t: Thread) -> Steps:
        for _ in range(self.turns):
            for statement in self.body:
                yield from statement.thread(t)


@dataclass
class Exit:
    """Some lanes of some warps, or all of them, leave their result and end."""

    lanes: int
    warps: int

    def ptx(self, e: Emitter) -> str:
        return (
            f"shr.b32 %n, {self.warps:#x}, %wp; shr.b32 %m, {self.lanes:#x}, %l; and.b32 %n, %n, %m; and.b32 %n, %n, 1;\n"
            "setp.ne.u32 %t, %n, 0; @%t st.global.u32 [%out], %x; @%t exit;\n"
        )

    def thread(self, t: Thread) -> Steps:
        if self.lanes >> t.lane & self.warps >> t.warp & 1:
            yield ("exit",)


@dataclass
class HandOver:
    """Some warps give to others, which alone wait: bar.arrive and bar.sync; and back, before the next time."""

    givers: list[int]
    takers: list[int]
    numbers: tuple[int, int]
    slots: int
    partner: dict[int, int]
    table: int

    def _barrier(self, kind: str, which: int) -> Barrier:
        return Barrier(kind, self.numbers[which], 32 * (len(self.givers) + len(self.takers)))

    def ptx(self, e: Emitter) -> str:
        takes, end, out = e.name("L"), e.name("L"), e.name("L")
        branches = "".join(f"setp.eq.u32 %t, %wp, {w}; @%t bra {takes};\n" for w in self.takers)
        gives = "".join(f"setp.eq.u32 %t, %wp, {w}; @%t bra {out};\n" for w in self.givers)
        return (
            f"{branches}{gives}bra {end};\n{out}: st.shared.u32 [%own+{4 * self.slots}], %x;\n"
            f"{self._barrier('arrive', 0).ptx(e)}{self._barrier('sync', 1).ptx(e)}bra {end};\n"
            f"{takes}: {self._barrier('sync', 0).ptx(e)}ld.global.u32 %n, [%partners+{self.table}]; add.u32 %n, %n, %area;\n"
            f"ld.shared.u32 %n, [%n+{4 * self.slots}]; mad.lo.u32 %x, %x, 31, %n;\n{self._barrier('arrive', 1).ptx(e)}{end}:\n"
        )

    def thread(self, t: Thread) -> Steps:
        if t.warp in self.givers:
            yield ("store", self.slots + t.tid, t.x)
            yield from self._barrier("arrive", 0).thread(t)
            yield from self._barrier("sync", 1).thread(t)
        elif t.warp in self.takers:
            yield from self._barrier("sync", 0).thread(t)
            got = yield ("load", self.slots + self.partner[t.tid])
            t.x = (t.x * 31 + got) & MASK
            yield from self._barrier("arrive", 1).thread(t)


def text(statements: Iterable, e: Emitter) -> str:
    return "".join(s.ptx(e) for s in statements)


class Program:
    """The program of one seed: ``source`` (PTX), ``table`` (its input), ``threads``, ``model()``."""

    def __init__(self, seed: int) -> None:
        print("seed of a program", seed)
        self.random = random.Random(seed)
        self.warps = self.random.randint(1, 4)
        self.threads = 32 * self.warps
        self._slots, self._numbers, self._loops, self._table = 0, 1, 0, bytearray()
        self.live = dict.fromkeys(range(self.warps), MASK)
        self.statements: list = []
        for _ in range(self.random.randint(3, 8)):
            if self.random.random() < 0.15:
                self._exit()
            else:
                self.statements += self._statement(dict(self.live), whole=True, depth=0)
        emitter = Emitter()
        body = text(self.statements, emitter)
        counters = ", ".join(f"%c{i}" for i in range(self._loops + 1))
        self.source = (
            ".visible .entry k(.param .u64 out, .param .u64 in) { .reg .pred %t, %dead; .reg .b64 %out, %partners, %w;\n"
            f".reg .b32 %x, %tid, %l, %wp, %m, %n, %own, %area, {counters}; .shared .align 4 .b8 area[{4 * self._slots + 4}];\n"
            "ld.param.u64 %out, [out]; ld.param.u64 %partners, [in]; mov.u32 %tid, %tid.x; mov.u32 %l, %laneid;\n"
            "shr.u32 %wp, %tid, 5; mul.wide.u32 %w, %tid, 4; add.u64 %out, %out, %w; add.u64 %partners, %partners, %w;\n"
            "mov.u32 %area, area; shl.b32 %own, %tid, 2; add.u32 %own, %own, %area; setp.gt.u32 %dead, %tid, 5000;\n"
            f"mad.lo.u32 %x, %tid, 2654435761, 12345;\n{body}st.global.u32 [%out], %x; ret;\n{''.join(emitter.far)}}}\n"
        )
        self.table = bytes(self._table) or bytes(4)

    # --- statements -------------------------------------------------------------------------------------------------
    def _local(self) -> Local:
        return Local(self.random.randrange(3, 1000, 2), self.random.choice((0, 0, 3, 7)), self.random.random() < 0.4)

    def _locals(self) -> list:
        return [self._local() for _ in range(self.random.randint(0, 2))]

    def _place(self, groups: Iterable[list[int]], takers: list[int] | None = None) -> tuple[int, dict[int, int], int]:
        """Words for each thread, whom it reads from (one of its group, or of the givers), and where that is told."""
        partner = {}
        for group in groups:
            for thread in takers if takers is not None else group:
                partner[thread] = self.random.choice(group)
        slots, table = self._slots, len(self._table)
        self._slots += self.threads
        for thread in range(self.threads):
            self._table += (4 * partner.get(thread, 0)).to_bytes(4, "little")
        return slots, partner, table

    def _number(self) -> int:
        """A barrier that no other statement uses: 0 is the whole block's."""
        self._numbers += 1
        return self._numbers - 1

    def _exchange(self, groups: Iterable[list[int]], barrier: Callable[[], Barrier]) -> Exchange:
        slots, partner, table = self._place(groups)
        return Exchange(barrier, slots, partner, table)

    def _branch(self, test: str, holds: Callable[[Thread], bool], then: list, otherwise: list) -> Branch:
        return Branch(test, holds, then, otherwise, self.random.randrange(4), self.random.random() < 0.3)

    def _by_lane(self, lanes: int, then: list, otherwise: list) -> Branch:
        test = f"shr.b32 %n, {lanes:#x}, %l; and.b32 %n, %n, 1; setp.ne.u32 %t, %n, 0;"
        return self._branch(test, lambda t: bool(lanes >> t.lane & 1), then, otherwise)

    def _some_lanes(self) -> int:
        return self.random.choice((1, 0xFFFF, 0xFF00FF00, 0x80000000, 0x55555555, self.random.getrandbits(32)))

    def _exit(self) -> None:
        lanes, warps = (
            self.random.choice((self._some_lanes(), MASK)),
            self.random.choice((15, self.random.randrange(1, 15))),
        )
        left = {warp: mask & ~lanes if warps >> warp & 1 else mask for warp, mask in self.live.items()}
        self.live = {warp: mask for warp, mask in left.items() if mask}
        self.statements.append(Exit(lanes, warps))

    def _statement(self, here: Lanes, whole: bool, depth: int) -> list:
        """``here``: who executes it; ``whole``: those are all lanes of their warps that have not exited."""
        if not here:
            return []
        r = self.random
        everybody = whole and here == self.live
        kinds = ["local", "by_value", "warp", "by_lane"]
        if everybody:
            kinds += ["block", "block", "reduce", "parted", "parted"]
        if whole:
            kinds += ["named", "by_warp", "loop", "hand_over", "parted_warp"]
        if depth > 2:
            kinds = ["local", "warp"] + (["block"] if everybody else [])
        if self._slots > 6000:
            kinds = ["local"]
        kind = r.choice(kinds)
        block = [32 * w + lane for w, mask in here.items() for lane in range(32) if mask >> lane & 1]
        by_warp = [[t for t in block if t // 32 == w] for w in here]
        aligned = r.random() < 0.7
        if kind == "by_value":  # whoever goes where depends on data
            bit = 1 << r.randrange(8)
            test = f"and.b32 %n, %x, {bit}; setp.ne.u32 %t, %n, 0;"
            return [self._branch(test, lambda t: bool(t.x & bit), self._locals(), self._locals())]
        if kind == "warp":
            return [self._exchange(by_warp, lambda: Barrier("warp", masks=dict(here)))]
        if kind == "by_lane":
            lanes = self._some_lanes()
            inside = {w: m & lanes for w, m in here.items() if m & lanes}
            outside = {w: m & ~lanes for w, m in here.items() if m & ~lanes}
            then = self._locals() + self._statement(inside, False, depth + 1) + self._locals()
            return [self._by_lane(lanes, then, self._locals() + self._statement(outside, False, depth + 1))]
        if kind == "block":
            return [*self._locals(), self._exchange([block], lambda: Barrier("sync", 0, 0, aligned))]
        if kind == "reduce":
            return [Barrier(r.choice(("popc", "and", "or")), 0, 0, aligned)]
        if kind in ("parted", "parted_warp"):  # one barrier, two instructions: lanes of a warp arrive at either
            lanes = self._some_lanes()
            if kind == "parted":
                exchange = self._exchange([block], lambda: Barrier("sync", 0, 0, False))
            else:
                exchange = self._exchange(by_warp, lambda: Barrier("warp", masks=dict(here)))
            return [self._by_lane(lanes, [*self._locals(), exchange], [*self._locals(), exchange])]
        if kind == "named" and self._numbers < 16:
            number = self._number()
            return [self._exchange([block], lambda: Barrier("sync", number, 32 * len(here), aligned))]
        if kind == "by_warp" and len(here) > 1:
            chosen = r.sample(sorted(here), r.randint(1, len(here) - 1))
            bits = sum(1 << w for w in chosen)
            test = f"shr.b32 %n, {bits:#x}, %wp; and.b32 %n, %n, 1; setp.ne.u32 %t, %n, 0;"
            then = self._locals() + self._statement({w: here[w] for w in chosen}, True, depth + 1)
            rest = {w: m for w, m in here.items() if w not in chosen}
            otherwise = self._locals() + self._statement(rest, True, depth + 1)
            return [self._branch(test, lambda t: t.warp in chosen, then, otherwise)]
        if kind == "loop":
            self._loops += 1
            counter = f"%c{self._loops}"
            body = self._statement(here, whole, depth + 1) + self._locals() + self._statement(here, whole, depth + 1)
            return [Loop(r.randint(2, 4), counter, body)]
        if kind == "hand_over" and len(here) > 1 and self._numbers < 15:
            chosen = r.sample(sorted(here), len(here))
            cut = r.randint(1, len(here) - 1)
            givers, takers = chosen[:cut], chosen[cut:]
            give = [t for t in block if t // 32 in givers]
            take = [t for t in block if t // 32 in takers]
            numbers = (self._number(), self._number())
            return [HandOver(givers, takers, numbers, *self._place([give], take))]
        return [self._local()]

    # --- the model --------------------------------------------------------------------------------------------------
    def model(self, seed: int) -> list[int]:
        """x of every thread at its end, threads moving in an order of this seed's."""
        print("seed of the threads' order", seed)
        return Model(self, random.Random(seed)).run()


class Model:
    def __init__(self, program: Program, order: random.Random) -> None:
        self.order = order
        self.threads = [Thread(t) for t in range(program.threads)]
        self.steps = [self._run(t, program.statements) for t in self.threads]
        self.live = set(range(program.threads))
        self.memory: dict[int, int] = {}
        self.answer = [0] * program.threads
        self.ready = list(range(program.threads))
        self.arrivals: dict[
            tuple[object, ...], dict[int, bool]
        ] = {}  # of a warp, at a barrier: thread -> its predicate
        self.waiting: dict[tuple[object, ...], dict[int, bool]] = {}  # of the block
        self.arrived: dict[tuple[object, ...], int] = {}
        self.kind: dict[tuple[object, ...], str] = {}  # of what waits there: several barriers may be under way

    @staticmethod
    def _run(t: Thread, statements: list) -> Steps:
        for statement in statements:
            yield from statement.thread(t)

    def run(self) -> list[int]:
        started = set()
        while self.ready:
            at = self.order.randrange(len(self.ready))
            self.ready[at], self.ready[-1] = self.ready[-1], self.ready[at]
            thread = self.ready.pop()
            try:
                event = self.steps[thread].send(self.answer[thread] if thread in started else None)
            except StopIteration:
                event = ("exit",)
            started.add(thread)
            getattr(self, f"_{event[0]}")(thread, *event[1:])
        assert not self.live, f"threads {sorted(self.live)} wait for ever: the program is not a legal one"
        return [t.x for t in self.threads]

    def _go(self, thread: int, answer: int = 0) -> None:
        self.answer[thread] = answer
        self.ready.append(thread)

    def _step(self, thread: int) -> None:
        self._go(thread)

    def _store(self, thread: int, address: int, value: int) -> None:
        self.memory[address] = value
        self._go(thread)

    def _load(self, thread: int, address: int) -> None:
        self._go(thread, self.memory[address])

    def _exit(self, thread: int) -> None:
        self.live.discard(thread)
        for key in list(self.arrivals):
            self._check_warp(key)
        for key in list(self.arrived):
            self._check_block(key)

    def _alive(self, warp: int) -> set[int]:
        return {t for t in range(32 * warp, 32 * warp + 32) if t in self.live}

    def _warp(self, thread: int, mask: int) -> None:
        key = ("warp", thread // 32, mask)
        self.arrivals.setdefault(key, {})[thread] = False
        self._check_warp(key)

    def _barrier(self, thread: int, kind: str, number: int, count: int, predicate: bool) -> None:
        key = ("barrier", thread // 32, kind, number, count)
        self.arrivals.setdefault(key, {})[thread] = predicate
        self._check_warp(key)

    def _check_warp(self, key: tuple) -> None:
        """Release a barrier if all threads of the warp for which it waits have arrived."""
        wanted = self._alive(key[1])
        if key[0] == "warp":
            wanted = {t for t in wanted if key[2] >> t % 32 & 1}
        there = self.arrivals.get(key, {})
        if not there or not wanted <= set(there):
            return
        del self.arrivals[key]
        if key[0] == "warp":
            for thread in there:
                self._go(thread)
            return
        _, _, kind, number, count = key
        block = (number, count)
        self.arrived[block] = self.arrived.get(block, 0) + 32
        if kind == "arrive":
            for thread in there:
                self._go(thread)
        else:
            self.waiting.setdefault(block, {}).update(there)
            self.kind[block] = kind
        self._check_block(block)

    def _check_block(self, block: tuple) -> None:
        expected = block[1] or 32 * len({t // 32 for t in self.live})
        if self.arrived.get(block, 0) < expected or not self.arrived.get(block):
            return
        self.arrived.pop(block)
        there = self.waiting.pop(block, {})
        values = list(there.values())
        result = {"popc": sum(values), "and": all(values), "or": any(values)}.get(self.kind.get(block, ""), 0)
        for thread in there:
            self._go(thread, int(result))
