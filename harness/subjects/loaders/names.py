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
