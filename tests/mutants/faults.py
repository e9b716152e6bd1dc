"""Faults that tests must see: one change of a line of `src/demask` each, with the test files that
are expected to fail for it, cheap ones first."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mutants.places import PLACES

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Fault:
    """A line of a source file, what replaces it, and the test files that must fail."""

    name: str
    file: str
    line: str
    wrong: str
    tests: tuple[str, ...]


def fault(name: str, file: str, line: str, wrong: str, *tests: str) -> Fault:
    """A fault; tests: names of test files without "test_"."""
    files = [path for test in tests for path in (ROOT / "tests").rglob(f"test_{test}.py")]
    return Fault(name, file, line, wrong, tuple(str(path.relative_to(ROOT)) for path in files))


WRITTEN = (
    # facts
    fault("zero-needs-both-factors", "facts/known.py", "zero = zeros[0] | zeros[1]",
          "zero = zeros[0] & zeros[1]", "micro", "laws"),
    fault("dynamic-sum-as-static", "facts/fills.py",
          "lengths = [dict.fromkeys(dynamic, n) for n in _LENGTHS] if dynamic else lengths",
          "pass", "numbers"),
    fault("pad-value-lost", "facts/movement.py", "torch.where(padded, value, fill)",
          "torch.where(padded, fill, fill)", "laws", "micro"),
    fault("affine-without-shift", "facts/known.py", "torch.where(zero, shift, fill)",
          "torch.where(zero, 0 * shift, fill)", "micro", "laws"),
    fault("needs-of-zero-factor", "facts/needed.py",
          "mask = mask | window_mask(relation, k, inputs[k], zero=True)",
          "mask = mask | window_mask(relation, k, inputs[k], zero=False)", "micro", "laws"),
    fault("complete-axis-not-whole", "facts/needed.py",
          "mask = any_over(mask, order, relation.complete | mixed(axes, relation.size))",
          "mask = any_over(mask, order, mixed(axes, relation.size))", "laws", "fills"),
    fault("not-uniform", "facts/masks.py",
          "known = all_along(known & (fill == first), [k], keepdim=True)",
          "known = all_along(known, [k], keepdim=True)", "laws", "micro"),
    fault("infinite-fills-are-known", "facts/masks.py",
          "known = known & torch.isfinite(to_computable(fill))",
          "known = known", "fills"),
    # the table
    fault("tile-end-rounds-down", "ops/regions.py",
          "-(-end // tile) * step", "end // tile * step", "laws"),
    # prune
    fault("added-number-vanishes", "prune/axis_ties.py",
          "self._force_lasting()\n", "pass\n", "groups"),
    fault("slices-of-moves-not-tied", "prune/axis_ties.py",
          "yield PositionTies(cells[0], cut.out[0], cut.position[taken], taken)",
          "yield PositionTies(cells[0], cut.out[0], taken, taken)", "groups"),
    fault("removed-units-count-again", "prune/pruner.py",
          "chosen = candidates.choose(scores[name], share) & mine",
          "chosen = candidates.choose(scores[name], share)", "pruner"),
    fault("columns-without-means", "prune/scores.py",
          "inside = ~member.mask(~gone).view(line)", "inside = member.mask(~gone).view(line)",
          "scores"),
    # graph
    fault("write-not-seen", "graph/capture/functionalize.py",
          "self.version[root] = self.version.get(root, 0) + 1",
          "self.version[root] = self.version.get(root, 0)", "micro", "fuzz"),
    fault("equal-sizes-not-checked", "graph/guards.py", "if size in variables:", "if False:",
          "guards", "micro"),
    fault("keywords-not-checked", "graph/guards.py", 'return f"{name} is not None"',
          'return "False"', "guards", "micro"),
    fault("exports-without-conditions", "graph/result/codegen.py",
          "for check in self.checks if args else ():", "for check in ():", "guards_files"),
    fault("onnx-takes-any-size", "files/onnx/write/size_conditions.py", "if not trees or not sized",
          "if trees or not sized", "guards_files"),
    fault("example-not-taken", "graph/capture/export_guards.py", "if not are_true([guard], sizes)",
          "if False", "guards"),
    # shrink
    fault("graph-shares-weights", "shrink/strategies.py",
          "target = copy_tensors(candidate.target, candidate.program.constants.values())",
          "target = candidate.target", "shared_weights"),
    fault("class-shares-weights", "shrink/own_class/build.py",
          "after = copy_tensors(proof.after, before.constants.values())",
          "after = proof.after", "shared_weights"),
    fault("parts-share-the-rest", "shrink/submodules.py",
          "structural_copy(sharing, share=False", "structural_copy(sharing, share=True",
          "shared_weights"),
    fault("join-sign", "shrink/emit/join.py", "torch.zeros((), dtype=fill.dtype)) * signs[k]",
          "torch.zeros((), dtype=fill.dtype))", "joins"),
    fault("scaled-identity", "shrink/emit/join.py", "if scaled and k == 0:", "if False:", "joins"),
    fault("transposed-border", "shrink/emit/border_map.py",
          "return flat.unsqueeze(0) if transposed else flat.unsqueeze(1)",
          "return flat.unsqueeze(1)", "micro"),
    fault("dropped-constants-lost", "shrink/emit/border_map.py",
          "gone = torch.ones(size, dtype=torch.bool)",
          "gone = torch.zeros(size, dtype=torch.bool)", "joins", "micro"),
    fault("carrier-without-the-others", "shrink/emit/contraction.py",
          'parts[g][carriers] += torch.einsum("dc,d...->c...", factors, products)', "pass",
          "class_layout"),
    fault("carrier-of-another-size", "facts/carriers.py",
          "return (solved / sizes).T, solved", "return solved.T, solved", "class_layout"),
    fault("any-number-hides-no-key", "facts/known.py",
          "return value if isinstance(value, bool) else _is_number(value) and math.isfinite(value)",
          "return value if isinstance(value, bool) else _is_number(value)", "attention_masks"),
    fault("one-branch-hides-no-key", "facts/known.py",
          "all(map(_is_shown, value[1:]))", "any(map(_is_shown, value[1:]))", "attention_masks"),
    fault("einsum-keeps-shared-letters-alone", "rewrites/normalize.py",
          "needed | set(other))", "needed)", "einsum"),
    fault("combinations-that-round", "facts/carriers.py",
          "if float(growth.max()) <= GROWTH:", "if True:", "carriers"),
    fault("full-rank-alone", "facts/carriers.py", ', driver="gelsd"', "", "carriers"),
    fault("saved-at-full-size", "shrink/demask.py",
          'for padded in (RUNNERS.get("smaller")(full), full):', "for padded in (full,):",
          "saved_configs"),
    fault("batch-as-captured", "graph/input_specs.py", "else program.example.size(size)",
          "else int(size.node.hint)", "report"),
    fault("experts-of-any-width", "checkpoint/plan.py", "EXPERT_MULTIPLE = 8",
          "EXPERT_MULTIPLE = 1", "mask"),
    fault("tables-without-their-last-column", "pages/html.py",
          "for k, text in enumerate(row) if k)", "for k, text in enumerate(row[:-1]) if k)",
          "pages"),
    fault("zeros-at-other-positions", "shrink/demask.py", "zeros[torch.meshgrid",
          "zeros.flip(0)[torch.meshgrid", "saved_configs"),
    fault("failing-model-is-captured", "shrink/strategies.py",
          "if call.check and isinstance(call.model, nn.Module):", "if False:", "device"),
    fault("zeros-of-values-alone", "shrink/own_class/small_graphs.py",
          "count * VISIBLE >= max(least[path], 1)", "count >= max(least[path], 1)",
          "parts_as_graphs"),
    # ONNX files, edited
    fault("judge-without-verdict", "files/onnx/check.py", "if verdict.difference:", "if False:",
          "onnx_judge"),
    fault("unknown-values-are-zero", "files/onnx/edit/editor.py",
          "if not known.all():", "if False:", "edited_files"),
    fault("operands-left-cut", "files/onnx/edit/calls.py",
          "editor.complete(name.removeprefix(UNCHANGED))", "name.removeprefix(UNCHANGED)",
          "edit_laws"),
    fault("insertions-without-a-price", "files/onnx/edit/edit_file.py",
          "return best if insert and least * WORTH < size else (result, barriers)", "return best",
          "edited_files"),
    fault("gemm-without-alpha", "files/onnx/edit/ops/contraction.py",
          'total = attributes.get("alpha", 1.0) * sum_of', "total = sum_of", "edit_laws"),
    fault("joined-parts-apart", "shrink/layout/class_layout.py",
          "union[source == j] |= part[position[source == j]]", "pass", "class_layout"),
    fault("groups-of-other-sizes", "shrink/layout/class_layout.py",
          "channels[spare[: size - int(channels.sum())]] = True", "pass", "class_layout"),
    fault("graph-called-twice", "shrink/own_class/small_graphs.py",
          "return self.count == 1 and", "return", "parts_as_graphs"),
    fault("layers-keep-their-number", "shrink/own_class/depth.py", "vars(part)[name] = new", "pass",
          "depth"),
    fault("second-moment-of-first-rows", "shrink/training/carry.py",
          "part = cut(value, piece.positions).reshape(own.shape)",
          "part = cut(value, [p if p is None or key != 'exp_avg_sq' else range(len(p)) for p in "
          "piece.positions]).reshape(own.shape)", "states", "carry"),
    fault("averages-of-removed-zeros", "shrink/training/carry.py",
          "return part * _average_factor(AVERAGED[key], piece) if key in AVERAGED else part",
          "return part", "states"),
    fault("states-of-what-went", "shrink/training/carry.py",
          "optimizer.state.pop(parameter, None)", "pass", "carry"),
    fault("new-ones-in-the-first-group", "shrink/training/carry.py",
          "while path:", "while False:", "carry"),
    fault("averages-without-constants", "shrink/training/carry.py",
          "if piece.offset is None:", "if True:", "carry"),
    fault("constants-twice", "shrink/training/expand.py",
          "is_offset = piece.offset is not None and not piece.carries", "is_offset = False",
          "expand"),
    fault("trained-border-forgotten", "shrink/training/expand.py",
          "if name in own and not torch.equal(own[name].to(before), before):", "if False:",
          "expand"),
    # machine
    fault("arena-overlap", "machine/arena.py",
          "if blocks[j].start <= new.end and new.start <= blocks[j].end",
          "if blocks[j].start < new.end and new.start < blocks[j].end", "arena"),
    fault("upper-bound-for-lower", "machine/clock.py",
          "return sorted(ratios)[int((1 - CONFIDENCE) * DRAWS)]",
          "return sorted(ratios)[int(CONFIDENCE * DRAWS)]", "timing"),
    # tune
    fault("weights-not-in-the-name", "files/optimized_files.py",
          "                _hash_tensor(digest, tensor)", "                pass", "optimized_files"),
    fault("earlier-choice-not-compared", "files/optimized_files.py",
          "if reasons := race.admit(EARLIER, network):",
          "race.modules[EARLIER] = network\n        if reasons := []:", "optimized_files"),
    fault("norm-without-eps", "tune/fold_affine.py", 'torch.rsqrt(var + call.arg("eps"))',
          "torch.rsqrt(var)", "tune", "optimize"),
    fault("norm-shift-sign", "tune/fold_affine.py",
          "(0 if bias is None else bias) - mean * scale",
          "(0 if bias is None else bias) + mean * scale", "tune", "optimize"),
    fault("transposed-fold-axis", "tune/fold_affine.py",
          "shape[axis] = -1\n        weight = weight * step.scale",
          "shape[0] = -1\n        weight = weight * step.scale", "tune"),
    # files
    fault("any-function-in-expressions", "files/pt2_gate.py",
          "if name not in _FUNCTIONS or call.keywords:", "if call.keywords:", "files_doors",
          "files_gate"),
    fault("unknown-entries-pass", "files/pt2_gate.py",
          "if name not in known and not name.startswith(_DROPPED):", "if False:", "files_gate",
          "files_doors"),
    # kernels and sparse
    fault("certificate-without-rounding", "kernels/cpu/zero_proof.py",
          "b.fmul(e_max, FLOAT(1 + 4 * UNIT))", "b.fmul(e_max, FLOAT(0.5))", "pilot_certified"),
    fault("mean-of-too-many", "sparse/plan/value_moves.py",
          '"pixels": height * width,', '"pixels": height * width + 1,',
          "sparse_plan", "sparse_segments", "sparse_op"),
    fault("pool-counts", "sparse/plan/value_moves.py",
          "scale = np.where(is_inside, 1 / np.maximum(counts, 1), 0)",
          "scale = np.where(is_inside, 1 / counts.max(), 0)", "sparse_plan", "sparse_segments"),
    fault("column-tiles-overlap", "sparse/plan/layers/tiling.py",
          "yield from ((a, b - a) for a, b in pairwise(bounds))",
          "yield from ((a, max(b - a - 1, 1)) for a, b in pairwise(bounds))", "sparse_plan",
          "sparse_op"),
    fault("claims-not-reset", "kernels/thread_team.py",
          'with e.loop(I64(0), field["words"]) as k:', "with e.loop(I64(0), I64(0)) as k:",
          "kernels_team"),
    fault("output-twice", "sparse/plan/segment_plan.py", "return ready.pop()", "return ready[-1]",
          "kernels_team", "segment_call"),
    fault("selection-of-the-traced-size", "sparse/segment_rows.py", "numbers = numbers + 1",
          "numbers = numbers.remainder(x.shape[axis])", "segment_call"),
    fault("stale-plan-of-the-last-call", "sparse/segment/inline.py",
          "if list(map(VERSION, weights)) != self.versions or get_num_threads() != self.threads:",
          "if get_num_threads() != self.threads:", "segment_call"),
    fault("zero-weights-unread", "sparse/plan/write_call.py",
          "if is_nan[x, out] and weight:", "if False:", "resizes"),
    fault("taps-of-one-tile-row", "sparse/plan/write_call.py",
          "is_line = ((least == most) & (least % lanes == 0))", "is_line = (least % lanes == 0)",
          "resizes"),
    fault("lines-of-other-lanes", "sparse/plan/value_moves.py",
          "is_line = ((first == least[:, None])", "is_line = ((first >= least[:, None])",
          "called_steps", "resizes", "sparse_plan"),
    fault("zeros-of-pads-lost", "sparse/plan/write_call.py",
          "read = np.where(numbers[pixel] < 0, -1, flat[pixel])", "read = flat[pixel]",
          "called_steps"),
    fault("bias-of-the-state-twice", "sparse/plan/recurrent_layer.py",
          'if self.step.op == "gru":  # that of gate n', "if False:  # that of gate n",
          "recurrent_steps"),
    fault("last-state-at-the-end-of-time", "sparse/plan/recurrent_layer.py",
          "last = 0 if self.backwards else steps", "last = steps", "recurrent_steps"),
    # traverse
    fault("row-too-few-kept", "traverse/planning/schedule.py",
          "return max(self.end - self.keep, 0)", "return max(self.end - self.keep - 1, 0)",
          "traverse_tile", "traverse_plans"),
    fault("frame-too-few-kept", "traverse/planning/schedule.py",
          "return max(self.end - self.keep, 0)", "return max(self.end - self.keep - 1, 0)",
          "traverse_videos"),
    fault("sum-fused-twice", "traverse/planning/schedule.py", "free -= set(units[-1].nodes)",
          "free -= {node}", "traverse_fuzz", "traverse_videos"),
    fault("border-row-missing", "traverse/planning/schedule.py",
          "seen[edge.source] = max(seen[edge.source], high)",
          "seen[edge.source] = max(seen[edge.source], high - 1)", "threads"),
    fault("stripe-overwrites-map", "traverse/planning/plan_memory.py",
          "if segment.workers > 1 or segment.stripe:", "if segment.workers > 1:", "stream_tasks"),
    fault("padding-inside", "traverse/local/windows.py", "padding.append(before if is_own else 0)",
          "padding.append(before)", "traverse_local"),
    fault("frames-as-images", "traverse/storage/stored_ends.py",
          'aliases = ALIASES | ({"T": "D"} if is_video else {})', "aliases = ALIASES",
          "traverse_videos"),
    # stride
    fault("max-pool-of-negatives", "stride/forms.py", "if site.drops and known.low < 0:",
          "if False:", "stride_forms"),
    fault("inexact-pair-of-masks", "stride/forms.py", "if math.frexp(a)[0] != 0.5:",
          "if False:", "stride_forms"),
    fault("windows-beyond-the-end", "stride/average_pools.py",
          "return count - 1 if ceil and (count - 1) * stride >= size + pad else count",
          "return count", "stride_pools"),
    fault("count-without-padding", "stride/average_pools.py",
          "return [min(start + kernel, size) - max(start, 0) for start in starts]",
          "return [min(start + kernel, size) - start for start in starts]", "stride_pools"),
    # pilot
    fault("one-sided-for-two", "pilot/guarantee.py",
          "tail = (1 - _checked(k, n, level)) / 2", "tail = 1 - _checked(k, n, level)",
          "pilot_guarantee", "docs"),
    fault("nuisance-not-paid", "pilot/guarantee.py",
          "return min(1.0, difference_at_most(lost - won, n, changes, loss) + spent)",
          "return min(1.0, difference_at_most(lost - won, n, changes, loss))",
          "pilot_guarantee"),
    fault("packets-out-of-order", "pilot/packet_writer.py",
          'np.argsort(-priorities[n], kind="stable")', 'np.argsort(priorities[n], kind="stable")',
          "pilot_packets"),
    # verify
    # the judge
    fault("lenient-judge", "judge.py", "and difference.gap <= self.allowed",
          "and difference.gap <= 1e3 * self.allowed", "verdicts", "verify"),
    fault("not-finite-passes", "judge.py", "if bool(others.any()):", "if False:", "numerics", "verdicts"),
    fault("infinity-of-any-sign", "judge.py", "((a == b) | (a.isnan() & b.isnan())",
          "((a.abs() == b.abs()) | (a.isnan() & b.isnan())", "numerics", "verdicts"),
    fault("nan-is-a-difference", "judge.py", "((a == b) | (a.isnan() & b.isnan())", "((a == b)",
          "numerics", "verdicts"),
    fault("nothing-proves", "judge.py", "if not self.difference and self.runs and self.runs == self.void:",
          "if False:", "numerics", "verdicts"),
    fault("half-precision-of-64-ulps", "judge.py", "min(ULPS * ulp, LARGEST * size)", "ULPS * ulp",
          "numerics", "verdicts"),
    fault("unequal-integers", "judge.py", 'Difference("" if same else f"({expected.dtype}) is not equal", size, gap,',
          'Difference("", size, 0.0,', "numerics", "verdicts"),
    fault("any-shape", "judge.py", "if expected.shape != actual.shape or expected.dtype != actual.dtype:",
          "if expected.dtype != actual.dtype:", "numerics", "verdicts"),
    fault("any-dtype", "judge.py", "if expected.shape != actual.shape or expected.dtype != actual.dtype:",
          "if expected.shape != actual.shape:", "numerics", "verdicts"),
    fault("float64-excuses-all", "judge.py", "self.is_same = own <= max(WORSE * error, self.allowed, flips * size)",
          "self.is_same = True", "verdicts", "verify"),
    fault("float64-excuses-nothing", "judge.py", "self.is_same = own <= max(WORSE * error, self.allowed, flips * size)",
          "self.is_same = False", "verdicts", "verify"),
    fault("noise-excuses-all", "judge.py",
          "self.allowed = max(self.allowed, compare(self._without_flips(a), self._without_flips(other)).gap)",
          "self.allowed = math.inf", "verdicts", "onnx_judge"),
    fault("noise-excuses-nothing", "files/onnx/check.py", "pair.move(others.get(pair.name))", "pass",
          "verdicts", "onnx_judge"),
    fault("no-constants-in-float64", "verify.py", "comparison.eps = 0.0 if refined else torch.finfo(own).eps",
          "comparison.eps = 0.0", "verify", "verdicts"),
    fault("slower-is-fast-enough", "machine/clock.py", "return least >= times", "return True", "optimize", "timing"),
    fault("candidates-left-out", "optimize.py",
          "race.modules[candidate.name], race.candidates[candidate.name] = module, candidate",
          "race.candidates[candidate.name] = candidate", "optimize"),
    # prune: recovery, sensitivity, search, callbacks; demask prune
    fault("distillation-without-t2", "prune/recovery.py",
          'soft = F.kl_div(guess, goal, reduction="batchmean", log_target=True) * temperature**2',
          'soft = F.kl_div(guess, goal, reduction="batchmean", log_target=True)', "recovery"),
    fault("momentum-not-restored", "prune/recovery.py", "norm.momentum = momentum",
          "norm.momentum = None", "recovery"),
    fault("removal-of-the-original", "prune/sensitivity.py",
          'slim = demask(copy, *as_arguments(self.example_inputs), check=False, result="graph")',
          "slim = demask(self.model, *as_arguments(self.example_inputs), check=False)",
          "sensitivity"),
    fault("proposals-of-the-finished", "prune/search.py",
          "history = [done[number] for number in range(numbers.start)]",
          "history = list(done.values())", "search"),
    fault("storage-of-any-search", "prune/search.py", "elif stored != identity:",
          "elif False:", "search"),
    fault("broken-line-stays", "prune/search.py", "_drop_broken_line(final)", "pass",
          "search"),
    fault("masks-after-the-optimizer", "prune/adapters/__init__.py",
          'state["masks"] = masks | state["masks"]', "pass", "adapters"),
    fault("small-network-without-carry", "cli/pruning.py",
          "demask.carry(slim, training.optimizer)", "pass", "cli_prune"),
    # budgets of prune
    fault("budget-exceeded", "prune/allocation/knapsack.py", "while cost > self.budget:",
          "while cost > 1.2 * self.budget:", "knapsack"),
    fault("knapsack-without-references", "prune/allocation/knapsack.py",
          "while choice not in tried and len(tried) < REFERENCES:", "while False:", "knapsack"),
    fault("best-slices-removed", "prune/allocation/budgets.py",
          "best = torch.sort(scores, descending=True, stable=True).indices[:count]",
          "best = torch.sort(scores, stable=True).indices[:count]", "budgets"),
    fault("fixed-positions-forgotten", "prune/removal_cost.py",
          "return Extent(int((owners < 0).sum()), slices)", "return Extent(0, slices)",
          "removal_cost"),
    fault("slices-by-their-mean", "prune/removal_cost.py",
          "int(positions[masks[name]].sum() if name in masks else positions.sum())",
          "int(positions.sum() * (masks[name].double().mean() if name in masks else 1))",
          "removal_cost"),
    fault("latency-exceeded", "prune/allocation/latency.py",
          "return [trial for trial in self.trials if trial.measured_ms <= 1e3 * budget]",
          "return [trial for trial in self.trials if trial.measured_ms <= 1.2e3 * budget]",
          "budgets"),
    fault("speed-of-the-machine-ignored", "prune/allocation/layer_seconds.py",
          "return self.seconds * own / first", "return own", "budgets"),
    fault("seconds-of-whole-blocks", "prune/allocation/layer_seconds.py",
          "return [mean(seconds) / size for seconds in zip(*fastest, strict=True)]",
          "return [mean(seconds) for seconds in zip(*fastest, strict=True)]", "budgets"),
    # checkpoint
    fault("checkpoint-live-slices-go", "checkpoint/plan.py",
          "key=lambda k: (fates[k].dead, not fates[k].constant, k)",
          "key=lambda k: k", "slim"),
    fault("checkpoint-constants-lost", "checkpoint/plan.py",
          "added[bias] = added[bias] + total if bias in added else total", "pass", "slim"),
    fault("checkpoint-layers-misnumbered", "checkpoint/plan.py",
          "layers.index(layer)) if layer in layers else None",
          "max(0, layers.index(layer) - 1)) if layer in layers else None", "slim"),
    fault("checkpoint-lists-uncut", "checkpoint/family.py",
          "part[key] = [value[k] for k in layers]", "part[key] = value[: len(layers)]", "slim"),
    fault("checkpoint-member-forgotten", "checkpoint/plan.py",
          "for member, parameter in mine.parameters():",
          "for member, parameter in [*mine.parameters()][:-1]:", "slim"),
    fault("checkpoint-first-layer-without-heads", "checkpoint/plan.py",
          "own.headless is not None and number >= own.headless", "own.headless is not None",
          "blocks"),
    fault("checkpoint-window-is-no-llama", "checkpoint/plan.py",
          "other is not None and not slides(stored.model.config)", "other is not None", "blocks"),
    fault("checkpoint-sizes-of-blocks-unread", "checkpoint/blocks.py",
          "if list(value.shape) != shape:", "if False:", "blocks"),
    fault("checkpoint-any-process-writes", "files/atomic_write.py",
          "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass", "checkpoint_input"),
    fault("checkpoint-goes-on-from-another", "checkpoint/slim.py",
          "if names and (path / STATE).read_text() != state:", "if False:", "checkpoint_input"),
    fault("checkpoint-nan-is-equal", "checkpoint/proof.py",
          "if value.isnan().any()", "if False", "checkpoint_input"),
)  # fmt: skip

OTHER = {
    " < ": " <= ",
    " <= ": " < ",
    " > ": " >= ",
    " >= ": " > ",
    " + ": " - ",
    " - ": " + ",
    "max(": "min(",
    "min(": "max(",
    " and ": " or ",
    " or ": " and ",
}
KINDS = {
    "off by one": r" (?:<=|>=|<|>) ",
    "sign": r" [+-] ",
    "extreme": r"\b(?:max|min)\(",
    "connective": r" (?:and|or) ",
}


def wrong_of(kind: str, line: str) -> str:
    """A line with a fault of a kind: the first of its operators replaced by the one next to it; a
    guard that never holds; a quotient rounded down; axes of a notation that need not be
    complete."""
    if kind == "guard":
        return re.sub(r"if .*:$", "if False:", line)
    if kind == "rounding":
        start = line.index("-(-")
        depth = [
            line[start + 1 : k].count("(") - line[start + 1 : k].count(")") for k in range(start + 2, len(line) + 1)
        ]
        end = start + 2 + depth.index(0)
        return line[:start] + "(" + line[start + 3 : end - 1] + ")" + line[end:]
    if kind == "incomplete":
        return line.replace("!", "")
    return re.sub(KINDS[kind], lambda operator: OTHER[operator[0]], line, count=1)


def _placed() -> list[Fault]:
    faults = []
    for file, tests, *lines in PLACES:
        for kind, line in lines:
            name = f"{file.removesuffix('.py')}: {kind}"
            name += f" {sum(f.name.startswith(name) for f in faults) + 1}"
            faults.append(fault(name, file, line, wrong_of(kind, line), *tests.split()))
    return faults


FAULTS = (*WRITTEN, *_placed())
