"""Record data/h200_published_forms.json: flash-linear-attention's two forms of RWKV6 beside flakit's, called as in the
report of the case chunk_vs_recurrent and with one scale. Needs a GPU, and fla-core installed beside flakit.

python data/record_published_forms.py [--out FILE]
"""

from flakit.bench.speed import peer_version
from flakit.cases import chunk_vs_recurrent as case
from flakit.cases.published import published_rwkv6
from flakit.numerics import recorded


def main() -> None:
    parser = recorded.script(__doc__, case.RECORDING)
    options = parser.parse_args()
    if published_rwkv6() is None:
        parser.error("expected a GPU, and flash-linear-attention (pip install fla-core), beside flakit")

    _, rows = case.published()
    for row in rows:
        print("  ".join(f"{x:.4g}" if isinstance(x, float) else x for x in row.values()))
    sizes = "B 4, T 1024, H 4, K 100, V 200; bfloat16, decay logsigmoid, seed 0"
    meta = recorded.provenance("python data/record_published_forms.py", sizes=sizes, **peer_version())
    print("wrote", recorded.write(options.out, meta, rows))


if __name__ == "__main__":
    main()
