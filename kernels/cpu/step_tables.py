"""The words of a step's tables, in the order in which they stand there; see `step`.

Numba takes the integers of a module for constants, so these are plain numbers and no `Enum`.
Words that begin with `AT_` hold an address.
"""

# --- a weight, within another table --------------------------------------------------------------
FORMAT, OUT, WIDTH, AT_DATA, AT_SCALES, AT_BIAS = range(6)
WEIGHT_WORDS = 6
FP32, INT8, Q8_0, INT4 = range(4)
"""Values of FORMAT, in the order of `weights.FORMATS`."""

# --- a layer -------------------------------------------------------------------------------------
AT_INPUT_NORM, AT_Q_NORM, AT_K_NORM, AT_MLP_NORM = range(4)
QKV, OUTPUT, GATE_UP, DOWN = range(4, 4 + 4 * WEIGHT_WORDS, WEIGHT_WORDS)

# --- the model -----------------------------------------------------------------------------------
HIDDEN_SIZE, INNER_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PLANES = range(6)
AT_EMBEDDING, AT_COS, AT_SIN, AT_FINAL_NORM = range(6, 10)
HEAD = 10

# --- the batch -----------------------------------------------------------------------------------
NUM_ROWS, NUM_SAMPLES = range(2)
AT_TOKEN_IDS, AT_POSITIONS, AT_SAMPLE_ROWS = range(2, 5)  # int64
AT_HIDDEN, AT_NORMED, AT_QKV, AT_ATTENDED, AT_GATE_UP, AT_GATED, AT_LOGITS = range(5, 12)  # float32
AT_STAMPS = 12  # when each phase began: int64 [phases, 2], seconds and nanoseconds
FAILED = 13  # 1 if some chunk could not be computed
NORMED_CODES, GATED_CODES = 14, 19  # each of these is five words: rounded activations
BATCH_WORDS = 24
AT_CODES8, AT_SCALES8, AT_SUMS, AT_CODES16, AT_SCALES16 = range(5)

# --- a phase -------------------------------------------------------------------------------------
AT_FUNCTION, NAME, LAYER, CHUNKS = range(4)
EACH = 4  # rows or panels of a chunk
ROWS = 5  # which word of the batch counts its rows: NUM_ROWS or NUM_SAMPLES
AT_WEIGHT = 6  # the words of the weight that it multiplies with, or rounds for
CODES = 7  # which words of the batch hold the activations it rounds, or reads rounded
X, Y = 8, 9  # which words of the batch hold the addresses of what it reads and writes
ACCUMULATE = 10
AT_MORE = 11  # a norm's weight, or the words of the layer
WINDOW_KIND = 12
PHASE_WORDS = 13
