"""Where things stand in the tables that host and device share."""

# of a tensor: addresses, then counts, then twice its group, plus 1 where the ratio of norms applies
FIELDS = ("param", "buffer", "second_buffer", "step", "elements", "first_chunk", "chunks", "group")

# of a group; what a method lacks has no effect at these values
SETTINGS = {
    "lr": 0.0,
    "momentum": 0.0,  # LAMB: beta1
    "weight_decay": 0.0,
    "eps": 0.0,
    "sign": 1.0,  # -1 to maximize
    "nesterov": 0.0,
    "mode": 0.0,  # the place in MODES or VARIANTS
    "trust": 1.0,
    "phi_low": float("-inf"),
    "phi_high": float("inf"),
    "max_ratio": float("inf"),
    "clamp": float("inf"),
    "beta2": 0.0,
    "max_grad_norm": float("inf"),
    "bias_correction": 1.0,
    "stochastic": 0.0,
}
MODES = ("coupled", "after_norm", "decoupled")
VARIANTS = ("you2017", "unscaled", "momentum")

# squared norms, a row of one number a tensor: of the gradient (or of what SNGM divides by its norm), of the
# parameter, of the direction of the step
ROWS = ("of_grad", "of_param", "of_direction")
