"""Files that run code in plain torch.export.load: each is shown to, then refused."""

import contextlib
import io
import json
import pathlib
import pickle
import sys
import zipfile

import pytest
import torch

from demask.errors import BadInput, RefusedFile
from demask.files.pt2_gate import check, open_pt2
from pt2_files import CALL, CONSTANTS, MODEL, SAMPLES, WEIGHTS, edited, pack, quietly
from torch_release import since

# ------------------------------------------------------------------ what runs code in plain torch


class Touch:
    """A pickle that creates a file when it is read."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path(self.marker),)


def mkdir(marker):
    """Source of one expression that leaves a folder where it ran."""
    return f'__import__("os").mkdir("{marker}")'


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def pickled_weight(entries, marker):
    def edit(config):
        config["config"]["fc.weight"].update(use_pickle=True, path_name="weight_9")

    return {**edited(entries, WEIGHTS, edit), "data/weights/weight_9": saved(Touch(marker))}


def pickled_constant(entries, marker):
    def edit(config):
        next(iter(config["config"].values())).update(use_pickle=True, path_name="tensor_9")

    return {**edited(entries, CONSTANTS, edit), "data/constants/tensor_9": saved(Touch(marker))}


def opaque_object(entries, marker):
    def edit(config):
        config["config"]["thing"] = {
            "path_name": "opaque_obj_0",
            "is_param": False,
            "use_pickle": True,
            "tensor_meta": None,
        }

    data = pickle.dumps(Touch(marker))
    return {**edited(entries, CONSTANTS, edit), "data/constants/opaque_obj_0": data}


def pickled_samples(entries, marker):
    return {**entries, SAMPLES: saved((Touch(marker),))}


def legacy_weights(entries, marker):
    return {**entries, "data/weights/model.pt": saved({"w": Touch(marker)})}


def legacy_constants(entries, marker):
    return {**entries, "data/constants/model.pt": saved({"w": Touch(marker)})}


def expression(entries, marker):
    """sympify evaluates the text of a symbolic size."""

    def edit(program):
        graph = program["graph_module"]["graph"]
        text = f"__import__('pathlib').Path({marker!r}).touch() or 5"
        graph["tensor_values"]["x"]["sizes"][0] = {"as_expr": {"expr_str": text, "hint": None}}

    return edited(entries, MODEL, edit)


def placeholder_name(entries, marker):
    """Names become source: a default value of a parameter runs when the function is defined."""
    text = entries[MODEL].decode()
    name = json.dumps(f"spare={mkdir(marker)}")
    return {
        **entries,
        MODEL: text.replace('{"name": "spare"}', f'{{"name": {name}}}').replace('"spare": {', f"{name}: {{").encode(),
    }


def argument_name(entries, marker):
    """An annotation in a parameter list is a dictionary's value in the body: valid as both."""

    def edit(program):
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        signature["forward_arg_names"] = ["x", "scale", f"spare, q: {mkdir(marker)}"]

    return edited(entries, MODEL, edit)


def keyword_name(entries, marker):
    def edit(program):
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        signature["forward_arg_names"] = None
        spec = json.loads(signature["in_spec"])
        keywords = ["scale", f"spare, q: {mkdir(marker)}"]
        spec[1]["children_spec"][1]["context"] = json.dumps(keywords)
        signature["in_spec"] = json.dumps(spec)

    return edited(entries, MODEL, edit)


def parameter_path(entries, marker):
    """A path that is no identifier is put between quotes, as it is (dots would split it)."""
    path = f"""weight" if exec("with open({marker!r}, 'w'): pass") else \""""
    quoted = json.dumps(f"fc.{path}").encode()
    return {name: data.replace(b'"fc.weight"', quoted) for name, data in entries.items()}


def file_op(entries, marker):
    """An ATen op that maps a file, and makes it."""

    def edit(program):
        node = next(n for n in program["graph_module"]["graph"]["nodes"] if "relu" in n["target"])
        node["target"] = "torch.ops.aten.from_file.default"
        values = {"filename": {"as_string": marker}, "shared": {"as_bool": True}, "size": {"as_int": 3}}
        node["inputs"] = [{"name": n, "arg": a, "kind": 1} for n, a in values.items()]

    return edited(entries, MODEL, edit)


def guard(entries, marker):
    def edit(program):
        program["guards_code"] = [mkdir(marker)]

    return edited(entries, MODEL, edit)


def default_factory(entries, marker):
    """Reading the spec of a result imports the module it names."""

    def edit(program):
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        context = {"default_factory_module": "planted", "default_factory_name": "x", "dict_context": ["y"]}
        leaf = {"type": None, "context": None, "children_spec": []}
        spec = {"type": "collections.defaultdict", "context": context, "children_spec": [leaf]}
        signature["out_spec"] = json.dumps([1, spec])

    return edited(entries, MODEL, edit)


def enumeration(entries, marker):
    def edit(program):
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        context = json.dumps([{"__enum__": True, "fqn": "planted:X", "name": "A"}])
        leaf = {"type": None, "context": None, "children_spec": []}
        spec = {"type": "builtins.dict", "context": context, "children_spec": [leaf]}
        signature["out_spec"] = json.dumps([1, spec])

    return edited(entries, MODEL, edit)


DOORS = [
    pickled_weight, pickled_constant, opaque_object, pickled_samples, legacy_weights,
    legacy_constants, expression, placeholder_name, argument_name, keyword_name, parameter_path,
    file_op, guard, default_factory, enumeration,
]  # fmt: skip
EXECUTED = [
    pytest.param(door, marks=since(2, 12, "opaque objects are not read")) if door is opaque_object else door
    for door in DOORS
]
HARMLESS_BEHIND = (pickled_samples,)  # left out of the copy that torch gets


def use(program):
    program.module()(*CALL[0], **CALL[1])


@pytest.mark.parametrize("door", EXECUTED, ids=lambda door: door.__name__)
def test_a_door_that_plain_torch_opens_is_closed(door, honest, tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    (tmp_path / "planted.py").write_text(f"open({str(marker)!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    path = pack(tmp_path / "planted.pt2", door(dict(honest), str(marker)))

    with contextlib.suppress(Exception):  # What counts is what ran before it failed.
        use(quietly(torch.export.load, path))
    sys.modules.pop("planted", None)
    assert marker.exists(), "plain torch was expected to run the planted code"
    marker.rmdir() if marker.is_dir() else marker.unlink()

    if door in HARMLESS_BEHIND:
        use(quietly(open_pt2, path))
    else:
        with pytest.raises(RefusedFile, match=r"planted\.pt2.*\n.*not opened"):
            open_pt2(path)
        with pytest.raises(RefusedFile):
            check(path)
    assert not marker.exists()


def test_the_old_zip_format_is_not_read(honest, tmp_path):
    path, marker = tmp_path / "old.pt2", tmp_path / "marker"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("version", "8.20")
        archive.writestr("serialized_exported_program.json", honest[MODEL])
        for name in ("state_dict", "constants", "example_inputs"):
            archive.writestr(f"serialized_{name}.pt", saved({"w": Touch(marker)}))
    with contextlib.suppress(Exception):
        quietly(torch.export.load, path)
    assert marker.exists()
    marker.unlink()
    with pytest.raises(BadInput, match=r"torch\.export\.save"):
        open_pt2(path)
    assert not marker.exists()


def test_compiled_libraries_are_refused(honest, tmp_path):
    entries = {**honest, "data/aotinductor/model/model.so": b"\x7fELF"}
    with pytest.raises(RefusedFile, match="aotinductor"):
        open_pt2(pack(tmp_path / "library.pt2", entries))
