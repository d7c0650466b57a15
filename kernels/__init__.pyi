# For tools that read source. Python must see no package here: a bare `import kernels`, by which transformers
# looks for another one, would find it.
