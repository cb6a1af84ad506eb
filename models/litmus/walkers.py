"""Page-table walkers of Arm as readers of PTEs: herd7 has a model of one stage of translation (`-variant vmsa`).

It has one PTE for each page, and no second stage. These tests take the rules of a change of a PTE, of a TLBI and of
its barriers to be the same for both stages (Arm ARM, DDI 0487, on TLB maintenance). The barriers and the TLBI are
those of the host's `flush`; the engine changes the PTE before. `crates/slat/src/guide.rs` says what a host must do.

P0 is the hypervisor, P1 the guest. A walk of the guest is part of the access that needs it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Walker:
    name: str
    about: str
    #: First values.
    init: str
    #: Instructions of P0 and of P1.
    hypervisor: tuple
    guest: tuple
    condition: str
    #: "Never" or "Sometimes".
    verdict: str
    #: Hardware features: variants of herd7.
    variants: tuple = ()
    #: Lines before the first values.
    head: str = ""
    #: (what is left out, by its number in `hypervisor`; the verdict then)
    without: tuple = ()

    def text(self, left_out=None):
        hypervisor = [line for number, line in enumerate(self.hypervisor) if number != left_out]
        guest = list(self.guest)
        height = max(len(hypervisor), len(guest))
        hypervisor += [""] * (height - len(hypervisor))
        guest += [""] * (height - len(guest))
        rows = [f" {one:<18} | {other:<18} ;" for one, other in zip(["P0", *hypervisor], ["P1", *guest])]
        name = self.name if left_out is None else f"{self.name}-without-{left_out}"
        return "\n".join(
            [f"AArch64 {name}", f'"{self.about}"', *([self.head] if self.head else []), "{", self.init, "}", *rows,
             f"exists ({self.condition})", ""]
        )


FLUSH = ("DSB ISH", "LSR X9,X2,#12", "TLBI VAAE1IS,X9", "DSB ISH")
ZAP = "0:X0=pte_x; 0:X1=(oa:phy_x,valid:0); 0:X2=x; "

TESTS = [
    Walker(
        "zap-and-guest-write", "A guest writes a page after it was zapped, flushed and read by the host.",
        f"pte_y=(oa:phy_x); {ZAP} 0:X3=y; 1:X0=1; 1:X2=x;",
        ("STR X1,[X0]", *FLUSH, "LDR W4,[X3]"), ("L0: STR W0,[X2]",),
        "0:X4=0 /\\ ~fault(P1:L0,x)", "Never", without=((1, "Sometimes"), (3, "Sometimes"), (4, "Sometimes")),
    ),
    Walker(
        "zap-and-guest-read", "A guest reads from a frame what its next owner stored after the flush.",
        f"pte_y=(oa:phy_x); {ZAP} 0:X3=y; 0:X4=1; 1:X2=x;",
        ("STR X1,[X0]", *FLUSH, "STR W4,[X3]"), ("L0: LDR W0,[X2]",),
        "1:X0=1", "Never", without=((1, "Sometimes"), (3, "Sometimes"), (4, "Sometimes")),
    ),
    Walker(
        "w-taken-and-guest-write", "A guest writes a page after a harvest took W, flushed and read the page.",
        "pte_y=(oa:phy_x); 0:X0=pte_x; 0:X1=(oa:phy_x,db:0); 0:X2=x; 0:X3=y; 1:X0=1; 1:X2=x;",
        ("STR X1,[X0]", *FLUSH, "LDR W4,[X3]"), ("L0: STR W0,[X2]",),
        "0:X4=0 /\\ ~fault(P1:L0,x)", "Never", without=((1, "Sometimes"), (3, "Sometimes"), (4, "Sometimes")),
    ),
    Walker(
        "d-cleared-and-guest-write",
        "A guest writes a page after a harvest cleared D, flushed and read it; D stays clear.",
        "pte_x=(oa:phy_x,db:1,dbm:1); pte_y=(oa:phy_x); 0:X0=pte_x; 0:X1=(oa:phy_x,db:0,dbm:1); 0:X2=x; 0:X3=y; "
        "1:X0=1; 1:X2=x;",
        ("STR X1,[X0]", *FLUSH, "LDR W4,[X3]"), ("L0: STR W0,[X2]",),
        "0:X4=0 /\\ ~fault(P1:L0,x) /\\ [pte_x]=(oa:phy_x,db:0,dbm:1)", "Never", head="TTHM=P1:HD",
        without=((1, "Sometimes"), (3, "Sometimes"), (4, "Sometimes")),
    ),
    Walker(
        "break-before-make", "A guest reads a page at its new frame, and then at its old one.",
        "x=1; y=2; 0:X0=pte_x; 0:X1=(oa:phy_x,valid:0); 0:X2=x; 0:X3=(oa:phy_y); 1:X2=x;",
        ("STR X1,[X0]", *FLUSH, "STR X3,[X0]"), ("L0: LDR W0,[X2]", "DMB ISH", "L1: LDR W1,[X2]"),
        "1:X0=2 /\\ 1:X1=1", "Never", without=((3, "Sometimes"),),
    ),
    Walker(
        "installed-and-faults-again",
        "A guest faults once more on a PTE that it knows to be there. The engine then finds nothing to do.",
        "pte_x=(oa:phy_x,valid:0); 0:X0=pte_x; 0:X1=(oa:phy_x); 0:X2=x; 0:X5=1; 0:X6=flag; 1:X6=flag; 1:X2=x;",
        ("STR X1,[X0]", "STLR W5,[X6]"), ("LDAR W5,[X6]", "L0: LDR W0,[X2]"),
        "1:X5=1 /\\ fault(P1:L0,x)", "Sometimes",
    ),
    Walker(
        "installed-and-faults-again-ets2",
        "The same, with FEAT_ETS2: a walk follows what its access is ordered behind.",
        "pte_x=(oa:phy_x,valid:0); 0:X0=pte_x; 0:X1=(oa:phy_x); 0:X2=x; 0:X5=1; 0:X6=flag; 1:X6=flag; 1:X2=x;",
        ("STR X1,[X0]", "STLR W5,[X6]"), ("LDAR W5,[X6]", "L0: LDR W0,[X2]"),
        "1:X5=1 /\\ fault(P1:L0,x)", "Never", variants=("ets2",),
    ),
    Walker(
        "installed-and-entered",
        "The same without FEAT_ETS2, where the guest's CPU makes a DSB and enters the guest (ISB).",
        "pte_x=(oa:phy_x,valid:0); 0:X0=pte_x; 0:X1=(oa:phy_x); 0:X2=x; 0:X5=1; 0:X6=flag; 1:X6=flag; 1:X2=x;",
        ("STR X1,[X0]", "STLR W5,[X6]"), ("LDAR W5,[X6]", "DSB ISH", "ISB", "L0: LDR W0,[X2]"),
        "1:X5=1 /\\ fault(P1:L0,x)", "Never",
    ),
]
