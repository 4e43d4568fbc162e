"""Layout of the tables that host and device share: the index of a name here is its index in the table."""

# Two int64 tables have one row for each name and one column for each tensor. The addresses are looked up at every step.
ADDRESSES = ("param", "grad", "buffer", "second_buffer", "count")
# The fields stay the same as long as the tensors have the same sizes and kinds. A chunk is the part of a tensor that
# one program processes; "chunks" is their number, and "index" is the tensor's index among all parameters.
FIELDS = ("elements", "first_chunk", "chunks", "group", "adapts", "index")

# float64 values of the whole step
STEP = ("scale", "found_inf")

# followed by float64 values of each group; settings that a method lacks keep these defaults, which have no effect
SETTINGS = {
    "lr": 0.0,
    "momentum": 0.0,  # LAMB: beta1
    "weight_decay": 0.0,
    "eps": 0.0,
    "sign": 1.0,  # -1 to maximize
    "nesterov": 0.0,
    "mode": 0.0,  # index in MODES or VARIANTS
    "trust_coefficient": 1.0,
    "phi_low": float("-inf"),
    "phi_high": float("inf"),
    "max_ratio": float("inf"),
    "clamp_grad": float("inf"),
    "beta2": 0.0,
    "max_grad_norm": float("inf"),
    "bias_correction": 1.0,
    "stochastic_rounding": 0.0,
}
MODES = ("coupled", "after_norm", "decoupled")
VARIANTS = ("you2017", "unscaled", "momentum")

# rows of squared norms: of the gradient (for SNGM, of the tensor that it normalises), the parameter and the update
SQUARES = ("grad", "param", "direction")
