"""Table of ONNX ops and their PyTorch functions, one file per family."""

from demask.files.onnx.op_functions import join_tables
from demask.files.onnx.ops.data import control, index, ml, move, reference, sequence, text, trees
from demask.files.onnx.ops.math import activation, cast, math, random, reduce, select
from demask.files.onnx.ops.nn import attention, image, linear, norms, pool, quantized, recurrent, resize, signal

#: every entry by (domain, op); "" is ONNX's own domain
ENTRIES = join_tables(
    math.OPS,
    move.OPS,
    index.OPS,
    linear.OPS,
    pool.OPS,
    norms.OPS,
    recurrent.OPS,
    attention.OPS,
    activation.OPS,
    cast.OPS,
    select.OPS,
    random.OPS,
    reduce.OPS,
    signal.OPS,
    control.OPS,
    sequence.OPS,
    text.OPS,
    quantized.OPS,
    reference.OPS,
    ml.OPS,
    trees.OPS,
    image.OPS,
    resize.OPS,
)
