# The guest that is measured: it writes a word to each of some pages, in order, and stores for each
# how far a counter went between the instructions around the write. `read_counter`, a macro of the
# program that has this code, reads the counter by one instruction: the cycles; or the time, where
# KVM emulates the other one.
#
# The same code runs on slat-metal and on KVM, with a block of words at a0:
#   0  the address of the first page
#   8  the number of pages, at least 1
#  16  the distance between pages, in bytes
#  24  unused, up to 48
#  48  for each page, the difference
# Then it calls its hypervisor, and begins again. It is copied for KVM: it has no addresses.
#
# A turn of the loop has 9 instructions. The difference is 2 where the write does not leave the guest:
# the write, and a read of the counter of cycles.

.balign 128                             # in one page
.global measured_guest
measured_guest:
    ld t0, 0(a0)
    ld t1, 8(a0)
    ld t2, 16(a0)
    addi t3, a0, 48
2:  read_counter t4
    sd t4, 0(t0)
    read_counter t5
    sub t5, t5, t4
    sd t5, 0(t3)
    addi t3, t3, 8
    add t0, t0, t2
    addi t1, t1, -1
    bnez t1, 2b
    .option push
    .option norvc
    ecall
    .option pop
    j measured_guest
.global measured_guest_end
measured_guest_end:
