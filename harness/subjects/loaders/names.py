"""The loaders' names, readable without torch."""

PACKAGE = "fulldiff.harness.subjects.loaders"
LOADERS = {
    "naive": f"{PACKAGE}.scanning:Naive",
    "naive-concatenating": f"{PACKAGE}.scanning:Concatenating",
    "hoisted": f"{PACKAGE}.scanning:Hoisted",
    "referential": f"{PACKAGE}.scanning:Referential",
    "referential-forced": f"{PACKAGE}.scanning:ReferentialForced",
    "indexed": f"{PACKAGE}.indexed:Indexed",
}
# Ways of a bench. A loader that was used on this model before: what it remembers is part of the bargain.
WARM = " (warm)"
# The first file alone, timed in the same blocks: what the others add.
FIRST = " (first file)"
