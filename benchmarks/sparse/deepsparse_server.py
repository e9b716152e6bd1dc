"""DeepSparse as a process, for cpu_sparse.py, which starts it with the Python of an
environment that has DeepSparse: `python deepsparse_server.py FILE.onnx BATCH CORES`.

It reads requests as frames from its standard input and writes answers as frames to its standard
output: a length of eight bytes, then that many bytes, JSON or an array as numpy stores it. The
first frame is the input; it answers with its version and the seconds it took to build an engine. On
"run" it sends the outputs; on "turn" it times calls by itself, so no pipe is in them. Between
requests it waits for bytes, its threads at rest. Needs numpy and deepsparse alone.
"""

from __future__ import annotations

import io
import json
import os
import struct
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "common"))  # another environment runs this file

import turns


def send(stream: BinaryIO, what: Any) -> None:
    """Writes a frame: an array, or any JSON value."""
    buffer = io.BytesIO()
    if isinstance(what, np.ndarray):
        np.save(buffer, what, allow_pickle=False)
    else:
        buffer.write(json.dumps(what).encode())
    data = buffer.getvalue()
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """What the next frame holds. EOFError where the other side has gone."""
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError("the other side has closed the pipe")
    data = stream.read(struct.unpack("<Q", head)[0])
    if data.startswith(np.lib.format.MAGIC_PREFIX):
        return np.load(io.BytesIO(data), allow_pickle=False)
    return json.loads(data)


def serve(requests: BinaryIO, answers: BinaryIO, file: str, batch: int, cores: int) -> None:
    """Answers until the other side closes."""
    x = receive(requests)
    import deepsparse  # type: ignore[import-not-found]  # it is in its own environment alone

    start = perf_counter()
    engine = deepsparse.Engine(file, batch_size=batch, num_cores=cores)
    inputs = [np.ascontiguousarray(x)]
    engine.run(inputs)  # which checks them: timed calls need not
    hello = {"version": deepsparse.__version__, "seconds": perf_counter() - start}
    turns.settle()
    send(answers, hello)
    while True:
        try:
            request = receive(requests)
        except EOFError:
            return
        if request["ask"] == "run":
            outputs = engine.run(inputs)
            send(answers, len(outputs))
            for output in outputs:
                send(answers, np.ascontiguousarray(output))
        else:
            seconds = turns.turn(lambda: engine.run(inputs, val_inp=False), request["least"])
            turns.settle()
            send(answers, seconds)


def main() -> None:
    # The library prints: what it writes to the standard output is sent to the standard error.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    file, batch, cores = sys.argv[1:]
    serve(sys.stdin.buffer, answers, file, int(batch), int(cores))


if __name__ == "__main__":
    main()
