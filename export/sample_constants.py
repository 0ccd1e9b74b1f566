"""Numbers of SampleTokens that the reference and the function body share; csrc/sample_tokens/arithmetic.h has them for C++."""

WEIGHT_BITS = 30  # the largest weight is 2^30
LEAST_EXPONENT = -30.0  # of 2: tokens below weigh nothing
LOG2_E = 1.44269502  # in float32
# 2^f = 1 + f (k1 + f (k2 + ...)) for |f| <= 1/2, in float32
POWER = (0.693147004, 0.240222424, 0.0555073395, 0.00967151392, 0.00132647075)
IN_PROMPT = 1 << 30  # what token_counts has more where the token stands in the prompt
MAX_LOGPROBS = 128
