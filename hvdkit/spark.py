"""Names the package that has hvdkit's Spark workers."""

raise ModuleNotFoundError(
    "hvdkit.spark is the package hvdkit-spark: run `pip install -c constraints.txt ./packages/spark` in a clone of "
    "hvdkit, and write `import hvdkit_spark`.",
    name="hvdkit_spark",
)
