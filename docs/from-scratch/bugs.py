"""Writes six programs that train GPT-2, each with one fault: from_scratch_bugs/bug_1.py to bug_6.py. Which one is it?

    python docs/from-scratch/bugs.py

Each is step_13.py, prints every tenth loss, and has one change. The changes are written in rot13, so that you do not read
them by chance; `diff docs/from-scratch/step_13.py from_scratch_bugs/bug_1.py` shows one, when you have named it.
"""

import codecs
from pathlib import Path

FOLDER = Path("from_scratch_bugs")
# what is replaced in step_13.py, and by what
BUGS: list[list[tuple[str, str]]] = [
    [
        ('S.fpnyrq_qbg_cebqhpg_nggragvba(d, x, i, vf_pnhfny=Gehr)', 'S.fpnyrq_qbg_cebqhpg_nggragvba(d, x, i, gbepu.barf(G, G).gevy(1).obby())'),
    ],
    [
        ('        frys.cbfvgvba += 1\n', '        frys.cbfvgvba += frys.enax == 0\n'),
    ],
    [
        ('    bcgvzvmre.mreb_tenq()\n', ''),
    ],
    [
        ('    bcgvzvmre.ybnq_fgngr_qvpg(genvare["bcgvzvmre"])\n', ''),
    ],
    [
        ('        # QQC nirentrf tenqvragf bire gur enaxf qhevat onpxjneq. Bapr cre fgrc vf rabhtu: va gur ynfg zvpeb-fgrc.\n        zbqry.erdhver_onpxjneq_tenq_flap = zvpeb_fgrc == ybnqre.tenq_npphz - 1  # glcr: vtaber[nffvtazrag]\n        _, ybff = zbqry(k, l)\n', '        _, ybff = zbqry(k, l)\n        # QQC nirentrf tenqvragf bire gur enaxf qhevat onpxjneq. Bapr cre fgrc vf rabhtu: va gur ynfg zvpeb-fgrc.\n        zbqry.erdhver_onpxjneq_tenq_flap = zvpeb_fgrc == ybnqre.tenq_npphz - 1  # glcr: vtaber[nffvtazrag]\n'),
    ],
    [
        ('                # 2 cre ynlre nqq gb gur erfvqhny fgernz: fpnyrq, fb gung vgf inevnapr qbrf abg tebj jvgu qrcgu\n                fpnyr = zngu.fdeg(2 * pbasvt.a_ynlre) vs anzr.raqfjvgu("p_cebw.jrvtug") ryfr 1\n                aa.vavg.abezny_(cnenzrgre, 0.0, 0.02 / fpnyr)', '                aa.vavg.abezny_(cnenzrgre, 0.0, 0.02)'),
    ],
]  # fmt: skip


def bug(number: int) -> str:
    """Returns the text of a program; 0 is the right one."""
    text = Path(__file__).with_name("step_13.py").read_text()
    edits = [("step % 50 == 0", "step % 10 == 0"), ('"from_scratch_log"', f'"{FOLDER}/log_{number}"')]
    edits += [(codecs.decode(a, "rot13"), codecs.decode(b, "rot13")) for a, b in BUGS[number - 1]] if number else []
    for right, wrong in edits:
        assert right in text, right
        text = text.replace(right, wrong)
    return text


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for number in range(1, len(BUGS) + 1):
        (FOLDER / f"bug_{number}.py").write_text(bug(number))


if __name__ == "__main__":
    main()
