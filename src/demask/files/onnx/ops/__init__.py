"""Table of ONNX ops and their PyTorch functions, one file per family."""

from demask.files.onnx.op_functions import join_tables
from demask.files.onnx.ops.data import control, index, ml, move, reference, text
from demask.files.onnx.ops.math import activation, cast, math, random, reduce
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
    random.OPS,
    reduce.OPS,
    signal.OPS,
    control.OPS,
    text.OPS,
    quantized.OPS,
    reference.OPS,
    ml.OPS,
    image.OPS,
    resize.OPS,
)
