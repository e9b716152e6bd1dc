"""Honest .pt2 files, as entries to edit: shared by the tests of the gate."""

import json
import warnings
import zipfile

import torch
import torch.nn.functional as F
from torch import nn

AUTO = torch.export.Dim.AUTO
MODEL = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
SAMPLES = "data/sample_inputs/model.pt"
STORED = zipfile.ZIP_STORED


class Small(nn.Module):
    """One layer, one constant, two keywords, one of which nothing reads."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 3)

    def forward(self, x, *, scale, spare):
        return {"y": F.relu(self.fc(x)) * scale + torch.tensor([1.0, 2.0, 3.0])}


CALL = (torch.ones(4, 5),), {"scale": torch.ones(3), "spare": torch.ones(2)}


def export(model, args, kwargs=None, shapes=None):
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")  # torch.export warns of its own internals
        return torch.export.export(model, args, kwargs, dynamic_shapes=shapes)


def quietly(function, *args, **kwargs):
    """The result of a call into torch, without torch's own warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def pack(path, entries, method=STORED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(f"model/{name}", data)
    return path


def edited(entries, name, edit):
    """The entries with one JSON document changed by `edit` (in place, or a new one)."""
    document = json.loads(entries[name])
    changed = edit(document)
    return {**entries, name: json.dumps(document if changed is None else changed).encode()}


def change_one_value(document, draw, values) -> None:
    """Delete a value of a JSON document, in place, drawn at random, or replace it by one of `values`."""
    entries, waiting = [], [document]
    while waiting:
        container = waiting.pop()
        for key, inner in [*(container.items() if isinstance(container, dict) else enumerate(container))]:
            entries.append((container, key))
            if isinstance(inner, dict | list):
                waiting.append(inner)
    container, key = draw.choice(entries)
    if draw.random() < 0.2:
        del container[key]
    else:
        container[key] = draw.choice(values)
