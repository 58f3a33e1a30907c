"""Colours that any colour vision can distinguish, after Okabe and Ito, with black and a brown instead of yellow."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#8C6D00")
GREY = "#B8B8B8"  # for smaller clusters, and for clients without a cluster
