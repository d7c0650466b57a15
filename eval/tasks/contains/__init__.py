"""lm-eval tasks in which the answer must stand in the model's continuation, as Based scores recall
(arXiv 2402.18668). lm-eval's own are classes, whose rows cannot come from local files. Prompts and scores are
theirs; squad_completion generates 48 tokens, as they and Based mean to, not lm-eval's default of 256."""
