"""The command `demask prune`. Torch is imported inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from demask.cli.options import Imports, ShowOptions, check_output, import_modules, plain
from demask.errors import BadInput
from demask.pages import Lines
from demask.progress import progress

RATE, DIGITS_EPOCHS, DIGITS_TUNE = 3e-3, 4.0, 6.0


def prune(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help='The word "digits" (scikit-learn\'s handwritten digits, no download), a zip of '
            "images as class/name.jpg, or a folder of them; a folder may have `train` and `test`.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the result: .pt2 or .demask.")],
    network: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="A function that returns the network, such as torchvision.models:resnet18. "
            "Default: a small network for digits.",
        ),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A state dict: .safetensors, or .pt of tensors alone.")
    ] = None,
    test: Annotated[Path | None, typer.Option(metavar="PATH", help="A zip or folder of test images.")] = None,
    side: Annotated[int | None, typer.Option(min=4, metavar="N", help="Resize images to N x N pixels.")] = None,
    normalize: Annotated[
        str, typer.Option(metavar="data|imagenet|none", help="Whose mean and deviation to use.")
    ] = "data",
    augment: Annotated[bool, typer.Option("--augment", help="Mirror and shift training images.")] = False,
    structure: Annotated[
        str, typer.Option(metavar="NAME", help="What to remove: channel, unit, head or expert.")
    ] = "channel",
    score: Annotated[
        str, typer.Option(metavar="NAME", help="l1, l2, taylor, activation, fluctuation or random: what is least.")
    ] = "l1",
    amount: Annotated[float | None, typer.Option(metavar="SHARE", help="Share to remove. Default: 0.5.")] = None,
    macs: Annotated[
        float | None, typer.Option(metavar="N", help="MACs to keep: a share of all up to 1, or a number.")
    ] = None,
    ms: Annotated[
        float | None, typer.Option(metavar="N", help="Milliseconds that one image may take on this machine.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Pruning steps, during the tuning.")] = 4,
    epochs: Annotated[
        float | None, typer.Option(min=0, help="Passes over the images before. Default: 0 with --weights.")
    ] = None,
    tune: Annotated[float | None, typer.Option(min=0, help="Passes over the images from the first step on.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images per training step.")] = 64,
    rate: Annotated[float, typer.Option(min=0, help="The highest learning rate, of AdamW.")] = RATE,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, order and draws.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Torch's threads. Default: one for digits, else torch's number.")
    ] = None,
    *,
    display: ShowOptions,
    imports: Imports = None,
) -> None:
    """Train a network on images, prune it while it trains, and write the small network.

    The network is trained (or its weights are read), pruned in steps during further training, and
    demasked; the small network computes the same, and trains on with the optimizer's state. Prints
    sizes, speed and accuracy before and after.

    \b
    Examples:
      demask prune digits -o digits.pt2 --report digits.html
      demask prune digits -o half.demask --macs 0.5 --score taylor
    """
    check_output(output, suffixes=(".pt2", ".demask"))
    _check_options(amount, macs, ms, normalize)
    with progress("loading") as step:
        import torch

        import demask
        from demask.cli.pruning import SCORES, PruneOptions, Training, TrainingOptions, prune_classifier
        from demask.cli.pruning_inputs import DIGITS, build_network, load_weights, read_images
        from demask.machine.clock import set_threads

        if score not in SCORES:
            raise BadInput(f"expected --score to be one of {', '.join(SCORES)}, got {score!r}")
        import_modules(imports)
        loaded = read_images(data, test, side, seed)
        torch.manual_seed(seed)
        model = build_network(network, len(loaded.classes), loaded.train.images.shape[1])
        if weights is not None:
            load_weights(model, weights)
        first = epochs if epochs is not None else 0.0 if weights else DIGITS_EPOCHS
        options = PruneOptions(
            first,
            DIGITS_TUNE if tune is None else tune,
            rounds,
            structure,
            score,
            0.5 if amount is None else amount,
            macs,
            ms,
        )
        training_options = TrainingOptions(batch, rate, normalize, augment, seed)
    total = len(loaded.train) // batch * (options.epochs + options.tune)
    count = threads or (1 if data == DIGITS else torch.get_num_threads())
    with progress("training", round(total) or None) as step, set_threads(count):
        training = Training(model, loaded, training_options, step)
        result = prune_classifier(training, options)
        save = demask.save if output.suffix == ".demask" else demask.to_pt2
        save(result.network, output)
    more = {"output": str(output), "verification": plain(result.verification)}
    written = Lines([f"written to {output}"], is_close=True)
    display.show(result.page().followed_by(written), more | result.to_dict())


def _check_options(amount: float | None, macs: float | None, ms: float | None, normalize: str) -> None:
    if sum(x is not None for x in (amount, macs, ms)) > 1:
        raise BadInput("--amount, --macs and --ms exclude one another: expected one of them")
    if amount is not None and not 0 < amount < 1:
        raise BadInput(f"expected --amount above 0 and below 1, got {amount:g}")
    if normalize not in ("data", "imagenet", "none"):
        raise BadInput(f"expected --normalize to be data, imagenet or none, got {normalize!r}")
