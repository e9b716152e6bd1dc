"""Pages as scanners see them, for the benchmarks of pilots: text of this project's documents and a
photograph on paper that is mostly empty, drawn from a seed.

The photograph is the one that TAEF2 decodes from its latent, in shared/data next to the project.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from traverse_networks import latent, taef2

DOCUMENTS = Path(__file__).parents[2] / "docs"
FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSerif.ttf"
MOST = 0.18  # of a page that blocks cover: with the tiles they touch less than a fifth
INSIDE = slice(66, 574)  # rows and columns of the decoded picture that are the photograph
NOISE, SHADE = 1 / 255, 0.06  # of a scan: sigma of each value; how much darker one side is


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of a page with something on it, in pixels. kind: "text" or "photograph"."""

    kind: str
    left: int
    top: int
    width: int
    height: int

    def near(self, other: Block, gap: int) -> bool:
        """Is less than `gap` between them?"""
        return (
            self.left < other.left + other.width + gap
            and other.left < self.left + self.width + gap
            and self.top < other.top + other.height + gap
            and other.top < self.top + self.height + gap
        )


def page(seed: int, size: int = 2048) -> tuple[Tensor, list[Block]]:
    """A page (1, 3, size, size) of values from 0, black, to 1, and the blocks on it."""
    draw = random.Random(seed)
    blocks = layout(draw, size)
    sheet = Image.new("RGB", (size, size), "white")
    for block in blocks:
        if block.kind == "photograph":
            sheet.paste(crop(draw, block), (block.left, block.top))
        else:
            write(sheet, draw, block, size)
    values = torch.frombuffer(bytearray(sheet.tobytes()), dtype=torch.uint8)
    x = values.reshape(1, size, size, 3).permute(0, 3, 1, 2).float() / 255
    generator = torch.Generator().manual_seed(seed)
    shade = 1 - SHADE * torch.linspace(0, 1, size)
    x = x * shade + NOISE * torch.randn(x.shape, generator=generator)
    return x.clamp(0, 1).contiguous(), blocks


def layout(draw: random.Random, size: int) -> list[Block]:
    """A photograph and up to three blocks of text, with gaps between them and at the border."""
    unit = size / 2048
    kinds = ["photograph", "text", "text", "text"]
    blocks: list[Block] = []
    margin, gap, covered = int(96 * unit), int(64 * unit), 0
    for kind in kinds:
        for _ in range(200):
            wide, high = ((400, 520), (320, 420)) if kind == "photograph" else ((560, 900), (140, 320))
            width, height = int(draw.randint(*wide) * unit), int(draw.randint(*high) * unit)
            block = Block(
                kind,
                draw.randint(margin, size - margin - width),
                draw.randint(margin, size - margin - height),
                width,
                height,
            )
            if covered + width * height > MOST * size * size:
                continue
            if not any(block.near(other, gap) for other in blocks):
                blocks.append(block)
                covered += width * height
                break
    return blocks


def write(sheet: Image.Image, draw: random.Random, block: Block, size: int) -> None:
    """Lines of a document, from anywhere in it, as many as a block holds."""
    height = max(int(draw.randint(22, 30) * size / 2048), 6)
    font = ImageFont.truetype(str(FONT), height)
    lines = wrapped(draw, block.width / (0.56 * height))
    pen, spaced = ImageDraw.Draw(sheet), int(1.35 * height)
    for k in range(block.height // spaced):
        line = next(lines)
        while line and pen.textlength(line, font=font) > block.width:
            line = line[:-1]
        place = (block.left, block.top + k * spaced)
        pen.text(place, line, font=font, fill=draw.choice([(0, 0, 0), (20, 20, 40)]))


def wrapped(draw: random.Random, width: float) -> Iterator[str]:
    """Lines of about so many letters, from a random place of the documents, and round again."""
    words = documents()
    start = draw.randrange(len(words))
    return iter(textwrap.wrap(" ".join((words[start:] + words)[:2000]), max(int(width), 8)))


@cache
def documents() -> list[str]:
    """The words of this project's documents."""
    return " ".join(path.read_text() for path in sorted(DOCUMENTS.glob("*.md"))).split()


def crop(draw: random.Random, block: Block) -> Image.Image:
    """A part of the photograph."""
    picture = photograph()
    left = draw.randint(0, max(picture.width - block.width, 0))
    top = draw.randint(0, max(picture.height - block.height, 0))
    part = picture.crop((left, top, left + block.width, top + block.height))
    return part.resize((block.width, block.height))


@cache
def photograph() -> Image.Image:
    """What TAEF2 decodes of its latent, but for what stands around the photograph."""
    with torch.no_grad():
        values = taef2()(latent(80, 80))[0, :, INSIDE, INSIDE].clamp(0, 1)
    return Image.fromarray((values * 255).round().byte().permute(1, 2, 0).contiguous().numpy())
