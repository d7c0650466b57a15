"""The numbers of the paper's Table 2 (Pythia-1.4B, English Wiki-40B, N = 8192)."""

# lm-eval's names of its benchmarks; `mmlu:5` is MMLU with five examples.
TASKS = ("arc_easy", "arc_challenge", "piqa", "mmlu", "mmlu:5")
# (column heading, task, number of examples, chance in per cent). The only copy of the paper at hand heads two
# columns ARC-E and does not say how they differ. A few ARC questions have three or five answers.
COLUMNS = (
    ("MMLU (0-shot)", "mmlu", 0, 25),
    ("MMLU (5-shot)", "mmlu", 5, 25),
    ("PIQA", "piqa", 0, 50),
    ("ARC-C", "arc_challenge", 0, 25),
    ("ARC-E", "arc_easy", 0, 25),
    ("ARC-E", "arc_easy", 0, 25),
)
# Attention: the paper's name and accuracies in per cent.
ACCURACIES = {
    "softmax": ("Regular Attention", (22.10, 23.04, 69.18, 33.83, 61.12, 60.34)),
    "gla": ("Gated LA", (21.15, 22.27, 65.38, 30.52, 57.73, 58.12)),
    "ours": ("Our LA", (21.16, 25.90, 68.63, 32.43, 59.95, 59.08)),
}
RUN = ("paper, Pythia-1.4B", "1.4 B", "3 B")  # its name, parameters and tokens
