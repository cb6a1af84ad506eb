// The guest that is measured: it writes a word to each of some pages, in order, and stores for each
// how far the counter went between the instructions around the write.
//
// The same code runs on slat-metal and on KVM, with a block of words at x0:
//   0  the address of the first page
//   8  the number of pages, at least 1
//  16  the distance between pages, in bytes
//  24  unused, up to 48
//  48  for each page, the difference
// Then it makes a hypercall, and begins again. It is copied for KVM: it has no addresses.
//
// A turn of the loop has 8 instructions. The difference is 2 where the write does not leave the guest:
// the write, and a read of the counter.

.balign 128                             // in one page
.global measured_guest
measured_guest:
    ldp x1, x2, [x0]
    ldr x3, [x0, #16]
    add x4, x0, #48
2:  mrs x5, cntpct_el0
    str x5, [x1]
    mrs x6, cntpct_el0
    sub x6, x6, x5
    str x6, [x4], #8
    add x1, x1, x3
    subs x2, x2, #1
    b.ne 2b
    hvc #0
    b measured_guest
.global measured_guest_end
measured_guest_end:
