"""A step of linear attention: the convolution, the state and the gated results of a key head.

An instruction computes the value heads of one sequence that read one key head. It reads and writes
their channels of the convolution's tail and their states once. In the first step of a launch it
reads the state that the sequence resumes from; later, the one that it writes. If a sequence has
several rows, each resumes from the state that the row before it writes.

The gates of the results, `z`, are in the buffer of the channels after these, or in one of their own
if the weights of both differ, for example in format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import DELTA_STEP, DELTA_STEP_APART, DELTA_STEPS
from tpcompile.ir.ops.decode.norm_linear import SPLIT
from tpcompile.ir.ops.groups import heads_read, runs_of
from tpcompile.ir.ops.resumed import STATE_HEADS, TAIL_CHANNELS
from tpcompile.vm.groups.arithmetic import exp, rms_norm, sigmoid, total
from tpcompile.vm.groups.kv import together
from tpcompile.vm.lowering.building import Building
from tpcompile.vm.lowering.handlers import lowers
from tpcompile.vm.program import Role, rules
from tpcompile.vm.program.accesses import Interval
from tpcompile.vm.program.instruction import (
    NONE,
    Memory,
    Probe,
    Range,
    StepInstruction,
    to_fp32,
    unseen,
)
from tpcompile.vm.program.instruction_set import instruction
from tpcompile.vm.program.meaning import HeadRead, Result, Values

_EPSILON = 1e-6
_CHANNELS = ("q_columns", "k_columns", "v_columns")
_COLUMNS_OF = {
    **dict.fromkeys(("q_conv", "k_conv"), "q_columns"),
    **dict.fromkeys(("v_conv", "delta_rule"), "out_columns"),
    **dict.fromkeys(("decay", "beta"), "heads"),
}
"""The attribute with the columns of each value that is reported but not stored."""


def _by_channels(
    rule: rules.BufferRule, *modes: str, ahead: tuple[str, ...] = ()
) -> rules.BufferRule:
    """Return the rule of a buffer whose channels of the head are accessed in these modes."""
    for mode in modes:
        for columns in _CHANNELS:
            rule = rule.accessed(rules.Access(mode, (*ahead, columns)))
    return rule


_PROJECTED = _by_channels(rules.scratch("batch", "inputs", dtype="T"), "reads", ahead=("sequence",))
_GATES = rules.scratch("batch", "2*v_heads", dtype="T")
_TAILS = rules.BufferRule(
    Role.TAILS, ("layers", "batch", "channels"), "T", ("layers", "held", "kept", "channels")
)
_TAILS = _by_channels(_TAILS, "reads", ahead=("layer", "before"))
_TAILS = _by_channels(_TAILS, "writes", ahead=("layer", "sequence"))
_STATES = rules.BufferRule(
    Role.STATES,
    ("layers", "batch", "v_heads"),
    rules.F32,
    ("layers", "held", "v_heads", "key", "value"),
)
_OWN, _BEFORE = ("layer", "sequence", "heads"), ("layer", "before", "heads")


@dataclass(frozen=True)
class DeltaOperands:
    """The inputs of a layer of linear attention, its weights, tails and states."""

    rank: Annotated[int, rules.RANK]
    layer: Annotated[int, rules.Number(0, "layers - 1")]
    projected: Annotated[int, _PROJECTED]
    z: Annotated[int, rules.scratch("batch", "gated", dtype="T").reads("sequence", "z_columns")]
    """The buffer of the gates of the results, which may be `projected`."""
    gates: Annotated[int, _GATES.reads("sequence", "heads").reads("sequence", "decay_columns")]
    weight: Annotated[int, _by_channels(rules.weight("channels", "1", "taps"), "reads")]
    bias: Annotated[int, rules.maybe(_by_channels(rules.weight("channels"), "reads"))]
    tails: Annotated[int, _TAILS]
    rate: Annotated[int, rules.weight("v_heads").reads("heads")]
    offset: Annotated[int, rules.weight("v_heads").reads("heads")]
    states: Annotated[int, _STATES.reads(*_BEFORE).writes(*_OWN)]
    norm: Annotated[int, rules.weight("value").reads()]
    eps: Annotated[float, rules.Real(0.0)]
    lengths: Annotated[int, rules.sole(Role.LENGTHS, "batch").reads("sequence")]
    clock: Annotated[int, rules.sole(Role.CLOCK, "1").reads()]
    read: Annotated[int, rules.sole(Role.READ, "batch").reads("sequence")]
    write: Annotated[int, rules.sole(Role.WRITE, "batch").reads("sequence")]
    out: Annotated[
        int, rules.scratch("batch", "v_heads*value", dtype="T").writes("sequence", "out_columns")
    ]
    batch: Annotated[int, rules.COUNT]
    sequence_rows: Annotated[int, rules.ALIKE]
    k_heads: Annotated[int, rules.COUNT]
    v_heads: Annotated[int, rules.COUNT]
    key: Annotated[int, rules.COUNT]
    value: Annotated[int, rules.COUNT]
    taps: Annotated[int, rules.Number(2)]
    kept: Annotated[int, rules.Number(1, exactly=("taps - 1",))]
    first_k: Annotated[int, rules.Number(1, exactly=("k_heads*key",))]
    first_v: Annotated[int, rules.Number(1, "channels - v_heads*value", exactly=("2*k_heads*key",))]
    first_z: Annotated[int, rules.Number(0, exactly=("gated - v_heads*value",))]
    channels: Annotated[int, rules.Number(1, exactly=("inputs - v_heads*value", "inputs"))]


@instruction
@dataclass(frozen=True)
class DeltaStep(StepInstruction):
    """The gated results of the value heads of a sequence that read one key head."""

    at: DeltaOperands
    sequence: Annotated[int, rules.Number(0, "batch - 1")]
    k_head: Annotated[int, rules.Number(0, "k_heads - 1")]
    heads: Annotated[Range, rules.Within("v_heads")]
    q_columns = Interval("k_head*key")
    k_columns = Interval("first_k + k_head*key")
    v_columns = Interval("first_v + heads*value")
    z_columns = Interval("first_z + heads*value")
    decay_columns = Interval("v_heads + heads")
    out_columns = Interval("heads*value")
    reads_head: ClassVar[HeadRead] = HeadRead("k_head", "heads")
    name: ClassVar[str] = "delta_step"
    opcode: ClassVar[int] = 16

    @property
    def before(self) -> Range:
        """The row, and the rows before it that may belong to its sequence."""
        stop = self.sequence + 1
        return Range(together(Range(self.sequence, stop), self.at.sequence_rows).start, stop)

    @property
    def traffic(self) -> int:
        """The bytes of the states, which are read and written."""
        return 8 * self.values

    @property
    def values(self) -> int:
        return self.heads.extent * self.at.key * self.at.value

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        operands, row = self.at, self.sequence
        if not int(memory[operands.lengths][row]):
            return
        inputs, gates = memory[operands.projected][row], memory[operands.gates][row].float()
        q, k, v = (self._convolved(memory, inputs, columns) for columns in self._channels)
        share = sigmoid(gates[self.heads.slice])
        changed = (
            gates[self.decay_columns.slice] + memory[operands.offset][self.heads.slice].float()
        )
        rates = exp(memory[operands.rate][self.heads.slice].float())
        decay = -rates * _softplus(changed)
        self._show(probe, q_conv=q, k_conv=k, v_conv=v, decay=decay, beta=share)
        q, k = _normalized(q) * self.at.key**-0.5, _normalized(k)
        state = self._old(memory, memory[operands.states][operands.layer])[self.heads.slice]
        state = state * exp(decay)[:, None, None]
        delta = v.view(-1, operands.value) - total(state * k[:, None], 1)
        state = state + k[:, None] * (delta * share[:, None])[:, None]
        memory[operands.states][operands.layer, self._new(memory), self.heads.slice] = state
        mixed = total(state * q[:, None], 1).to(inputs.dtype)
        self._show(probe, delta_rule=mixed.flatten())
        normed = rms_norm(mixed, memory[operands.norm], operands.eps).float()
        z = memory[operands.z][row, self.z_columns.slice].view(-1, operands.value).float()
        gated = normed * (z * sigmoid(z))
        memory[operands.out][row, self.out_columns.slice] = gated.flatten().to(inputs.dtype)

    def meaning(self, values: Values) -> Iterator[Result]:
        operands = self.at
        inputs, gated = values.shape("projected")[1], values.shape("z")[1]
        channels = operands.channels
        projected = SPLIT(values["projected"], [channels, inputs - channels], 1)[0]
        z = SPLIT(values["z"], [operands.first_z, gated - operands.first_z], 1)[1]
        named = (values[name] for name in ("gates", "weight", "bias"))
        previous = {name: values.part(name, operands.layer) for name in ("tails", "states")}
        out = DELTA_STEP_APART(
            projected,
            z,
            *named,
            previous["tails"],
            values["rate"],
            values["offset"],
            previous["states"],
            values["norm"],
            operands.eps,
            values.input("starts"),
            values["lengths"],
            values["read"],
            values["write"],
            operands.layer,
            values.heads,
        )
        yield Result("out", out)
        for name in previous:
            yield Result(name, values.new(name), (operands.layer,))

    def _show(self, probe: Probe, **values: torch.Tensor) -> None:
        """Send values of the sequence that are not stored to a probe."""
        row = Range(self.sequence, self.sequence + 1)
        for name, value in values.items():
            probe(name, row, getattr(self, _COLUMNS_OF[name]), value[None])

    @property
    def _channels(self) -> tuple[Range, ...]:
        return self.q_columns, self.k_columns, self.v_columns

    def _convolved(self, memory: Memory, inputs: torch.Tensor, columns: Range) -> torch.Tensor:
        """Convolve some channels, and store their new tail."""
        operands, channels = self.at, columns.slice
        tails = memory[operands.tails][operands.layer]
        taken = torch.cat([self._old(memory, tails)[:, channels], inputs[None, channels]])
        tails[self._new(memory), :, channels] = taken[1:]
        weight = memory[operands.weight][channels, 0].float()
        convolved = taken[0].float() * weight[:, 0]
        for tap in range(1, operands.taps):
            convolved = convolved + taken[tap].float() * weight[:, tap]
        if operands.bias != NONE:
            convolved = convolved + memory[operands.bias][channels].float()
        return (convolved * sigmoid(convolved)).to(inputs.dtype).float()

    def _old(self, memory: Memory, states: torch.Tensor) -> torch.Tensor:
        """Return the state or the tail that the sequence resumes from; zeros if it is new."""
        operands = self.at
        if int(memory[operands.lengths][self.sequence]) == 1:
            return torch.zeros_like(states[0])
        source = operands.write if int(memory[operands.clock]) else operands.read
        return states[int(memory[source][self.sequence])]

    def _new(self, memory: Memory) -> int:
        return int(memory[self.at.write][self.sequence])

    def report(self, memory: Memory, probe: Probe) -> None:
        row = Range(self.sequence, self.sequence + 1)
        mixed = memory[self.at.out][row.slice, self.out_columns.slice]
        probe("mixed", row, self.out_columns, mixed)


def _normalized(head: torch.Tensor) -> torch.Tensor:
    """Divide a head by its length."""
    return head / torch.sqrt(total(head * head) + _EPSILON)


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.softplus(x.double()).float()


@lowers(*DELTA_STEPS)
def delta_step(builder: Building, node: fx.Node) -> None:
    """Lower the node to an instruction for each sequence and key head."""
    batch, columns = builder.plan.batch, builder.local_columns(node)
    shapes = [(batch, width) for width in columns]
    out = builder.declare("mixed", shapes, value_type(node).dtype)
    builder.put(node, out)
    bound = builder.bound(node)
    tails = _declare_states(builder, bound["tails"], TAIL_CHANNELS)
    states = _declare_states(builder, bound["states"], STATE_HEADS)
    for rank in range(builder.ranks):
        operands = _operands(builder, node, rank, tails + rank, states + rank, out + rank)
        read = heads_read(operands.v_heads, operands.k_heads, builder.bound(node, rank)["k_heads"])
        for sequence in range(batch):
            for k_head, first, last in runs_of(read):
                heads = Range(first, last + 1)
                builder.instructions.append(DeltaStep(operands, sequence, k_head, heads))


def _declare_states(builder: Building, node: fx.Node, dim: int) -> int:
    """Declare tails or states. Regions index sequences, and memory indexes kept states.

    `dim` is the dimension of the channels or of the value heads.
    """
    kind = value_type(node)
    role = Role.TAILS if dim == kind.dims - 1 else Role.STATES
    shapes, storages = [], []
    for rank in range(builder.ranks):
        layers, _, *shape = kind.local_shape(rank)
        sizes = tuple(map(int, shape))
        shapes.append((int(layers), builder.plan.batch, sizes[dim - 2]))
        storages.append((int(layers), 2 * builder.plan.batch, *sizes))
    return builder.declare(role.word, shapes, kind.dtype, role, storages)


def _operands(
    builder: Building, node: fx.Node, rank: int, tails: int, states: int, out: int
) -> DeltaOperands:
    bound, batch = builder.bound(node, rank), builder.plan.batch
    channels, _, taps = map(int, value_type(bound["weight"]).local_shape(rank))
    (v_heads,) = map(int, value_type(bound["rate"]).local_shape(rank))
    key, value = map(int, value_type(bound["states"]).shape[-2:])
    k_heads = (channels - v_heads * value) // (2 * key)
    fused = node.target is DELTA_STEP
    weights = {
        name: builder.buffer(bound[name], rank) for name in ("weight", "rate", "offset", "norm")
    }
    return DeltaOperands(
        rank=rank,
        layer=bound["layer"],
        projected=builder.buffer(bound["projected"], rank),
        z=builder.buffer(bound["projected" if fused else "z"], rank),
        gates=builder.buffer(bound["gates"], rank),
        bias=builder.buffer_if(bound["bias"], rank),
        tails=tails,
        states=states,
        eps=to_fp32(bound["eps"]),
        lengths=builder.sole(Role.LENGTHS, (batch,)) + rank,
        clock=builder.sole(Role.CLOCK, (1,)) + rank,
        read=builder.sole(Role.READ, (batch,)) + rank,
        write=builder.sole(Role.WRITE, (batch,)) + rank,
        out=out,
        batch=batch,
        sequence_rows=builder.plan.sequence_rows,
        k_heads=k_heads,
        v_heads=v_heads,
        key=key,
        value=value,
        taps=taps,
        kept=taps - 1,
        first_k=k_heads * key,
        first_v=2 * k_heads * key,
        first_z=channels if fused else 0,
        channels=channels,
        **weights,
    )
