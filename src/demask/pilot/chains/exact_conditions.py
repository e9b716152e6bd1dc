"""Conditions that change no output: columns of zero inputs and rows that are proved zero are
skipped.

Each chain linear, ReLU, linear, … of the graph becomes one call (`pilot.chains.chain_op`), in
which each layer has the mode that is predicted to be the fastest for the example inputs. A chain
that no mode makes faster stays as it was, and the module says why. Skipping columns needs no pilot;
it is most of the gain wherever hidden values are mostly zero.

A graph that is a single chain is called without the graph interpreter: to run a graph of one call costs
some 40 µs (flattened arguments, module attributes, op dispatch), as long as the chain itself may take,
and several times as much where that code is not in a cache. So the plan of the last call
(`pilot.chains.chain_op`) is tried first, if everything that the graph would check is as it was then:
the weights and their versions, dtype and shape of the input, threads, gradients, hooks, modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from demask.compat.dispatch import count_dispatch_modes, count_function_modes, has_functorch_transforms, tracing_state
from demask.compat.fx_internals import signature_of
from demask.compat.modules import has_any_global_hook
from demask.errors import BadInput
from demask.exec.tape.tape import NoPlan
from demask.facts.analysis import Analysis
from demask.graph.editor import GraphEditor
from demask.graph.recorded_run import RecordedRun
from demask.graph.result.demasked_module import Demasked
from demask.kernels.memory_probe import MemoryProbe
from demask.kernels.plan_cache import plans_of
from demask.ops import TABLE, Table, op_name, schema
from demask.pilot.chains.chain_cost import ChainRates, Reads, here, reads
from demask.pilot.chains.chain_op import CHAIN, ROWS, ChainPlans, ChainStep
from demask.pilot.chains.chain_plan import ChainLayer, ChainPlan, LayerCounts
from demask.pilot.conditions.base import Args, Condition, Conditioned, Decision, Kwargs
from demask.shrink.build_uncut import build_uncut
from demask.shrink.pipeline import capture_program

aten = torch.ops.aten

Call = Callable[..., Any]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True)
class BoundTensor:
    """A tensor of a network: its module path, its name, and its state at the last call. memory:
    keeps that memory alive, so that no other tensor gets its address."""

    path: tuple[str, ...]
    name: str
    tensor: Tensor
    memory: Tensor
    version: int
    address: int

    @classmethod
    def of(cls, network: nn.Module, target: str) -> BoundTensor:
        """The tensor at a `get_attr` target of a network."""
        *path, name = target.split(".")
        owner = network.get_submodule(".".join(path))
        tensor = owner._parameters.get(name)
        tensor = owner._buffers[name] if tensor is None else tensor
        assert tensor is not None
        version = -1 if tensor.is_inference() else tensor._version
        return cls(tuple(path), name, tensor, tensor.detach(), version, tensor.data_ptr())

    def same(self, network: nn.Module) -> bool:
        """Whether the network still has this tensor there, unchanged."""
        owner: Any = network
        for part in self.path:
            owner = owner._modules.get(part)
            if owner is None:
                return False
        current = owner._parameters.get(self.name)
        current = owner._buffers.get(self.name) if current is None else current
        return (
            current is self.tensor
            and current._version == self.version
            and current.data_ptr() == self.address
            and current.is_contiguous()
        )


@dataclass(frozen=True, slots=True)
class Direct:
    """The plan of the last call with an input of this shape, and the state under which it holds."""

    plan: Callable[[Tensor], Tensor]
    probe: MemoryProbe | None
    weights: tuple[BoundTensor, ...]
    shape: torch.Size
    threads: int
    trained: bool  # a weight wants gradients

    @classmethod
    def of(cls, network: fx.GraphModule, x: Tensor) -> Direct | None:
        """The state after a call with x; None where the graph is more than a chain, or there is no
        plan."""
        if type(x) is not Tensor or x.ndim < 2 or x.shape[:-1].numel() > ROWS:
            return None
        call = only_chain(network)
        if call is None:
            return None
        _, reads, program = call.args
        targets = [str(read.target) for read in reads]  # type: ignore[union-attr]
        weights = tuple(BoundTensor.of(network, target) for target in targets)
        tensors = [weight.tensor for weight in weights]
        if not all(w.is_contiguous() and not w.is_inference() for w in tensors):
            return None
        plans, threads = plans_of(tensors, str(program), ChainPlans), torch.get_num_threads()
        plan, _ = plans.plans.get((plans.versions_of(tensors), threads), (None, ()))
        trained = any(w.requires_grad for w in tensors)
        return plan and cls(plan, plans.probe, weights, x.shape, threads, trained)

    def __call__(self, network: nn.Module, x: Any) -> Tensor | None:
        """The output; None where this call must run through the graph."""
        if (
            type(x) is not Tensor
            or x.shape != self.shape
            or x.dtype is not torch.float32
            or not (x.is_cpu and x.is_contiguous())
            or (torch.is_grad_enabled() and (self.trained or x.requires_grad))
            or torch.get_num_threads() != self.threads
            or not is_unobserved()
            or not all(weight.same(network) for weight in self.weights)
            or self.probe is None
            or not self.probe.same()
        ):
            return None
        try:
            if len(self.shape) == 2:
                return self.plan(x)
            return self.plan(x.view(-1, self.shape[-1])).view(*self.shape[:-1], -1)
        except NoPlan:  # no memory for it at this moment
            return None


def is_unobserved() -> bool:
    """Whether no mode, transform, trace or hook observes the calls of this thread."""
    return not (
        count_dispatch_modes()
        or count_function_modes()
        or has_functorch_transforms()
        or tracing_state()
        or has_any_global_hook()
    )


def only_chain(network: fx.GraphModule) -> fx.Node | None:
    """The call of a graph that is one chain call, with one input and one output; else None."""
    nodes = [node for node in network.graph.nodes if node.op != "get_attr"]
    if [node.op for node in nodes] != ["placeholder", "call_function", "output"]:
        return None
    placeholder, call, output = nodes
    specs: Any = signature_of(network.graph)
    leaf = pytree.tree_structure(0)
    one_input = pytree.tree_structure(((0,), {}))
    if call.target is not CHAIN or call.args[0] is not placeholder:
        return None
    if specs.in_spec != one_input or specs.out_spec != leaf or list(output.args[0]) != [call]:
        return None
    return call


def call_directly(through: Call) -> Call:
    """The `__call__` of a class that torch.fx generated for one module: the plan directly, or
    `through`, which runs the graph.

    The state of the last call is stored at the class, so that copies and pickles have none of it.
    """

    def call(self: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return nn.Module.__call__(self, *args, **kwargs)
        if kwargs or len(args) != 1:
            return through(self, *args, **kwargs)
        if any(getattr(self, hooks) for hooks in HOOKS):
            return through(self, *args)
        kind: Any = type(self)
        direct = vars(kind).get("direct")
        output = direct and direct(self, args[0])
        if output is None:
            output = through(self, *args)
            if isinstance(output, Tensor) and not output.requires_grad and is_unobserved():
                kind.direct = Direct.of(self, args[0])
        return output

    return call


LINEAR = aten.linear.default


@dataclass(frozen=True, slots=True)
class LinearChain:
    """A chain. calls: its linear calls; relus: whether ReLU follows each; last: its last node;
    names:
    of its layers."""

    calls: tuple[fx.Node, ...]
    relus: tuple[bool, ...]
    last: fx.Node
    names: tuple[str, ...]


def remove_dropout(editor: GraphEditor) -> None:
    """Remove dropouts that do nothing in eval mode."""
    for node in editor.calls(aten.dropout.default):
        if not schema.draws_random_numbers(node):
            editor.replace(node, node.args[0])


def find_chains(editor: GraphEditor) -> tuple[list[LinearChain], list[Decision]]:
    """The longest chains, in order, and why other layers are in none."""
    chains, decisions, taken = [], [], set()
    for node in editor.calls(LINEAR):
        if node in taken:
            continue
        name = layer_name(editor, node)
        if reason := _why_in_no_chain(editor, node):
            decisions.append(Decision(name, "as it was", reason))
            continue
        calls, relus, last = [node], [], node
        while True:
            relu = _only_reader(last)
            relus.append(relu is not None and relu.target is aten.relu.default)
            last = relu if relus[-1] and relu is not None else last
            follower = _only_reader(last)
            if not relus[-1] or follower is None or follower.target is not LINEAR:
                break
            if follower.args[0] is not last or _why_in_no_chain(editor, follower):
                break
            calls.append(follower)
            last = follower
        taken.update(calls)
        names = tuple(layer_name(editor, call) for call in calls)
        chains.append(LinearChain(tuple(calls), tuple(relus), last, names))
    return chains, decisions


def reader_names(chain: LinearChain) -> str:
    """The ops that read the last layer of a chain, in words."""
    readers = [op_name(user) for user in chain.last.users if user.op == "call_function"]
    return " and ".join(dict.fromkeys(readers)) or "the output"


def layer_name(editor: GraphEditor, call: fx.Node) -> str:
    """The name of a layer: that of the module with its weight."""
    weight = schema.arguments(call)["weight"]
    if weight.op != "get_attr":
        return call.name
    return editor.constants[str(weight.target)].name.rpartition(".")[0]


def replace_chain(editor: GraphEditor, chain: LinearChain, modes: Sequence[str]) -> None:
    """Replace a chain by one call, its layers in these modes."""
    steps, weights = [], []
    for call, relu, mode in zip(chain.calls, chain.relus, modes, strict=True):
        arguments = schema.arguments(call)
        weights += [w for w in (arguments["weight"], arguments["bias"]) if w is not None]
        steps.append(ChainStep(mode, arguments["bias"] is not None, relu))
    text, first = ",".join(map(str, steps)), schema.arguments(chain.calls[0])["input"]
    chain_call = editor.insert(chain.last.next, chain.last, CHAIN, first, weights, text)
    chain.last.replace_all_uses_with(chain_call, lambda user: user is not chain_call)


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _why_in_no_chain(editor: GraphEditor, call: fx.Node) -> str:
    """Why a linear call can be in no chain; "" where it can."""
    arguments = schema.arguments(call)
    tensors = [editor.tensor(w) for w in (arguments["weight"], arguments["bias"]) if w is not None]
    if any(t is None for t in tensors):
        return "its weight or bias is computed"
    for t in tensors:
        assert t is not None
        if t.dtype is not torch.float32 or t.device.type != "cpu":
            kind = str(t.dtype).removeprefix("torch.")
            return f"its weights are {kind} on {t.device.type}, expected float32 on the CPU"
        if not bool(t.isfinite().all()):
            return "its weights have NaN or infinities: 0 times one of them is not 0"
    return ""


SAMPLES = 16  # rows of the example inputs from which modes are chosen
GAIN = 1.05  # a chain must be predicted to be so many times as fast
SMOOTH = ("gelu", "silu", "mish", "softplus", "sigmoid", "tanh", "elu", "selu", "celu")


class Chained(Demasked):
    """A network with chains in it. conditioned: what was decided, per layer."""

    trains = False
    conditioned: Conditioned

    def recompile(self) -> Any:
        """The code, as torch.fx returns it; calls run the plan directly where the graph is only a
        chain."""
        code, kind = super().recompile(), type(self)
        if only_chain(self) is not None:
            kind.__call__ = call_directly(kind.__call__)
        return code

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        copied.conditioned = self.conditioned
        return copied


@dataclass(frozen=True, slots=True)
class Columns:
    """A condition that skips products with zero inputs of linear layers; outputs do not change.

    A condition selects the work that a network does. Pass `Columns()`, or its text "columns", to
    the function `condition`. There are no parameters. In chains of linear layers and ReLU, a column
    of the weight is not read where the input that multiplies the column is 0. No pilot is needed:
    zeros are detected as the network runs. Layers for which skipping is predicted not to be faster
    stay dense, and other layers stay as they are. Outputs equal those of `unconditioned` bit for
    bit, and those of the model up to the rounding of sums in another order.

    Raises:
        BadInput: when the condition is applied: the pilot is not None.
        NotExportable: when the condition is applied: torch.export cannot capture the model.

    Example:
        >>> import torch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> from demask.pilot import Columns, condition
        >>> net = Sequential(Linear(64, 256), ReLU(), Linear(256, 10)).eval()
        >>> x = torch.randn(1, 64).relu()  # half of the inputs are zero
        >>> fast = condition(net, (x,), condition=Columns(), check=False)
        >>> fast.conditioned.exact, torch.allclose(fast(x), net(x), atol=1e-5)
        (True, True)
    """

    name: ClassVar[str] = "columns"

    def applied(self, model: nn.Module, args: Args, kwargs: Kwargs, pilot: Any, table: Table = TABLE) -> Chained:
        """The module in which zero inputs are skipped; raises BadInput for a pilot other than None.

        Arguments are those of `Condition.applied`.
        """
        if pilot is not None:
            raise BadInput(
                "columns needs no pilot: zeros of the live input are detected as it runs; "
                f"leave it out, or take the condition 'certified'; got {pilot!r:.80}"
            )
        return chained(model, args, kwargs, self, ("dense", "columns"), table)


@dataclass(frozen=True, slots=True)
class Certified:
    """A condition that skips the weights of units that are proved to be zero after a ReLU.

    A condition selects the work that a network does. Pass `Certified()`, or its text "certified" or
    "certified:levels=2", to the function `condition`. In chains of float32 linear layers and ReLU
    on the CPU, the upper bits of the weights give an upper bound on each unit (output of a layer).
    Where the bound is below zero, the ReLU returns 0, and the unit's row of weights is not read.
    Columns of zero inputs are skipped, too, where that is predicted to be faster (`Columns`).
    Outputs equal those of `unconditioned` bit for bit, and those of the model up to the rounding of
    sums in another order.

    Args:
        bits: bits of the weights from which the bound follows; 8, the default, is the only value.
        levels: 1 (the default): all 8 bits are read at once; 2: 4 bits are read first, and the
            other 4 only for rows that the first do not decide.

    Raises:
        BadInput: `bits` or `levels` has another value; when the condition is applied: the pilot is
            not None.

    Example:
        >>> import torch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> from demask.pilot import Certified, condition
        >>> net = Sequential(Linear(64, 256), ReLU(), Linear(256, 10)).eval()
        >>> x = torch.randn(1, 64)
        >>> proved = condition(net, (x,), condition=Certified(), check=False)
        >>> proved.conditioned.exact, torch.allclose(proved(x), net(x), atol=1e-5)
        (True, True)
    """

    name: ClassVar[str] = "certified"
    bits: int = 8
    levels: int = 1

    def __post_init__(self) -> None:
        if self.bits != 8 or self.levels not in (1, 2):
            raise BadInput(
                f"expected bits=8 and levels=1 or 2, got bits={self.bits}, "
                f"levels={self.levels}; fewer bits alone prove too little"
            )

    def applied(self, model: nn.Module, args: Args, kwargs: Kwargs, pilot: Any, table: Table = TABLE) -> Chained:
        """The module in which proved rows are skipped; raises BadInput for a pilot other than None.

        Arguments are those of `Condition.applied`; the weights' own upper bits are the pilot.
        """
        if pilot is not None:
            raise BadInput(
                f"certified derives its pilot from the weights, with a bound; leave pilot out; got {pilot!r:.80}"
            )
        proving = "certified" if self.levels == 1 else "two"
        return chained(model, args, kwargs, self, ("dense", "columns", proving), table)


def unconditioned(model: nn.Module, args: Args, kwargs: Kwargs = None, *, table: Table = TABLE) -> Chained:
    """A reference network for `Columns` and `Certified`: the same order of sums, nothing skipped.

    Networks to which `condition` applied `Columns` or `Certified` return the outputs of this
    network bit for bit. The model itself sums in another order, so the model's outputs may differ
    from both by rounding.

    Args:
        model: the network, an nn.Module or ExportedProgram, which is not changed. Chains of float32
            linear layers and ReLU run in the kernels of these conditions, all other layers in
            torch.
        args: example inputs by position, a tuple.
        kwargs: example inputs by name; default None: none.
        table: facts about each ATen op; default: the library's table.

    Returns:
        A torch.fx module with the same inputs and outputs, and an attribute `conditioned` (a
        `Conditioned`) that says for each layer whether it is in a chain.

    Raises:
        BadInput: `model` or `args` has another type, or the inputs do not fit the model.
        TypeError, ValueError: `kwargs` is neither a mapping nor None.
        NotExportable: torch.export cannot capture the model.

    Example:
        >>> import torch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> from demask.pilot import Columns, condition, unconditioned
        >>> net = Sequential(Linear(64, 256), ReLU(), Linear(256, 10)).eval()
        >>> x = torch.randn(1, 64).relu()
        >>> fast = condition(net, (x,), condition=Columns(), check=False)
        >>> torch.equal(unconditioned(net, (x,))(x), fast(x))
        True
    """
    return chained(model, args, kwargs, Columns(), ("dense",), table, always=True)


def chained(
    model: nn.Module,
    args: Args,
    kwargs: Kwargs,
    condition: Condition,
    allowed: Sequence[str],
    table: Table,
    *,
    always: bool = False,
) -> Chained:
    """The network with its chains, each layer in the mode of `allowed` that is predicted to be the
    fastest. always: replace chains that gain nothing, too. The model is not changed."""
    before = capture_program(model, args, kwargs, None)
    editor = GraphEditor(before)
    remove_dropout(editor)
    chains, decisions = find_chains(editor)
    inputs = inputs_of_chains(editor, chains, args, kwargs)
    for chain, x in zip(chains, inputs, strict=True):
        decisions += decided(editor, chain, x, allowed, always=always)
    after = editor.finish()
    plain = build_uncut(Analysis(before, table), after, [f"{len(chains)} chains of linear layers"])
    info: Any = signature_of(plain.graph)
    network = Chained.of(plain, plain.graph, info, plain.demasked).eval()
    by = "" if condition.name == "columns" else "bits:8"
    network.conditioned = Conditioned(condition, by, exact=True, decisions=tuple(decisions))
    return network


def decided(
    editor: GraphEditor, chain: LinearChain, x: Tensor | None, allowed: Sequence[str], *, always: bool
) -> list[Decision]:
    """Choose the modes of a chain, replace it, and return why, one decision per layer."""
    if x is None or x.dtype is not torch.float32 or not x.numel():
        what = "empty" if x is not None and not x.numel() else "not seen"
        if x is not None and x.dtype is not torch.float32:
            what = str(x.dtype).removeprefix("torch.")
        why = f"its example input is {what}, expected float32 of one row or more"
        return [Decision(name, "as it was", why) for name in chain.names]
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > ROWS and not always and x.ndim > 2:
        why = f"its input has {len(rows)} rows in a call; chains are for {ROWS} at most"
        return [Decision(name, "as it was", why) for name in chain.names]
    try:
        picked = choose(layers_of(editor, chain), rows[:SAMPLES].contiguous(), allowed)
    except NoPlan as reason:
        return [Decision(name, "as it was", str(reason)) for name in chain.names]
    gain = picked.dense / picked.seconds
    if gain < GAIN and not always:
        why = f"predicted gain {gain:.2f} times, expected {GAIN} or more"
        return [
            Decision(name, "as it was", f"{why}; {said}{_smooth_activation_note(chain, name)}")
            for name, said in zip(chain.names, picked.why, strict=True)
        ]
    replace_chain(editor, chain, picked.modes)
    return [
        Decision(name, mode, f"{said}{_smooth_activation_note(chain, name)}")
        for name, mode, said in zip(chain.names, picked.modes, picked.why, strict=True)
    ]


def _smooth_activation_note(chain: LinearChain, name: str) -> str:
    """A note for a last layer before an activation that produces no zeros, else ""."""
    if name != chain.names[-1] or chain.relus[-1]:
        return ""
    after = reader_names(chain)
    smooth = [word for word in SMOOTH if word in after]
    return f"; {smooth[0]} after it produces no zeros to skip" if smooth else ""


@dataclass(frozen=True, slots=True)
class Picked:
    """Modes of a chain's layers and why; what they read; predicted seconds of a call, and of a
    dense one."""

    modes: tuple[str, ...]
    why: tuple[str, ...]
    reads: tuple[Reads, ...]
    seconds: float
    dense: float


def choose(
    layers: Sequence[ChainLayer], rows: Tensor, allowed: Sequence[str], machine: ChainRates | None = None
) -> Picked:
    """The fastest allowed mode of each layer, by what these rows [n, columns] read. machine: None
    for this one (`chain_cost.here`)."""
    machine = machine or here()
    options: list[list[tuple[float, str, str, Reads]]] = []
    counts = {mode: observed(layers, rows, mode) for mode in allowed}
    for k, layer in enumerate(layers):
        (count, columns), choices = layer.weight.shape, []
        for mode in allowed:
            if mode in ("certified", "two") and not layer.relu:
                continue
            seen = counts[mode][k]
            layer_reads = reads(count, columns, mode, seen)
            share = min(1.0, machine.cache / (4.0 * count * columns))
            seconds = machine.seconds([layer_reads], [share]) - machine.call
            extra = machine.layer if mode in ("certified", "two") else 0.0
            # a dense layer counts no zeros: there are as many as "columns" counted
            shown = counts.get("columns", counts[mode])[k] if mode == "dense" else seen
            choices.append((seconds + extra, mode, _describe_counts(layer, mode, shown), layer_reads))
        options.append(choices)
    best = [min(choices_of_layer, key=lambda one: one[0]) for choices_of_layer in options]
    weight_bytes = [4.0 * layer.weight.numel() for layer in layers]
    share = min(1.0, machine.cache / sum(weight_bytes))
    dense = machine.seconds([Reads(dense=size) for size in weight_bytes], [share] * len(layers))
    layer_reads = tuple(one[3] for one in best)
    seconds = machine.call + sum(one[0] for one in best)
    modes, why = tuple(one[1] for one in best), tuple(one[2] for one in best)
    return Picked(modes, why, layer_reads, seconds, dense)


def observed(layers: Sequence[ChainLayer], rows: Tensor, mode: str) -> list[LayerCounts]:
    """The mean counts of each layer in a mode, over rows."""
    modes = [mode if layer.relu or mode in ("dense", "columns") else "columns" for layer in layers]
    counts: list[list[LayerCounts]] = []
    ChainPlan(layers, modes, 1)(rows, counts)
    return [
        LayerCounts(
            *(
                round(sum(values) / len(counts))
                for values in zip(*((one[k].columns, one[k].first, one[k].rows) for one in counts), strict=True)
            )
        )
        for k in range(len(layers))
    ]


def _describe_counts(layer: ChainLayer, mode: str, seen: LayerCounts) -> str:
    rows, columns = layer.weight.shape
    live = f"{seen.columns / max(columns, 1):.1%} of its inputs are not zero"
    if mode not in ("certified", "two"):
        return live
    return f"{seen.rows / max(rows, 1):.1%} of its rows are not proved zero, {live}"


def layers_of(editor: GraphEditor, chain: LinearChain) -> list[ChainLayer]:
    """A chain's layers as plans take them."""
    layers = []
    for call, relu in zip(chain.calls, chain.relus, strict=True):
        arguments = schema.arguments(call)
        weight, bias = (editor.tensor(arguments[key]) for key in ("weight", "bias"))
        assert weight is not None
        layer_bias = None if bias is None else bias.detach().contiguous()
        layers.append(ChainLayer(weight.detach().contiguous(), layer_bias, relu))
    return layers


def inputs_of_chains(
    editor: GraphEditor, chains: Sequence[LinearChain], args: Args, kwargs: Kwargs
) -> list[Tensor | None]:
    """The inputs of the chains, computed from the example inputs."""
    firsts = [schema.arguments(chain.calls[0])["input"] for chain in chains]
    return values_of(editor, firsts, args, kwargs)


def values_of(editor: GraphEditor, nodes: Sequence[fx.Node], args: Args, kwargs: Kwargs) -> list[Tensor | None]:
    """The values of nodes on the example inputs, None for those that do not run."""
    program = replace(editor.program, graph=editor.graph, constants=editor.constants)
    flat = pytree.tree_leaves((args, dict(kwargs or {})))
    run = RecordedRun(program, set(nodes))
    holders = len(editor.graph.find_nodes(op="placeholder"))
    if holders != len(flat):
        raise BadInput(f"expected {holders} example inputs, got {len(flat)}")
    with torch.no_grad():
        run.run(*flat)
    return [value if value is None else value.detach() for value in map(run.values.get, nodes)]
