# Entry into the guest, and the trap that ends its stay. `sscratch` has the address of the guest's
# registers while the hart is in the guest.
#
# The hypervisor's code uses no floating-point and no vector registers: the guest's stay where they are.

.text
.global enter_guest
enter_guest:
    addi sp, sp, -128
    sd ra, 0(sp)
    sd gp, 8(sp)
    sd tp, 16(sp)
    sd s0, 24(sp)
    sd s1, 32(sp)
    sd s2, 40(sp)
    sd s3, 48(sp)
    sd s4, 56(sp)
    sd s5, 64(sp)
    sd s6, 72(sp)
    sd s7, 80(sp)
    sd s8, 88(sp)
    sd s9, 96(sp)
    sd s10, 104(sp)
    sd s11, 112(sp)
    sd sp, HOST_SP(a0)
    csrw sscratch, a0
    la t0, leave_guest
    csrw stvec, t0
    ld t0, PC(a0)
    csrw sepc, t0
    ld t0, SSTATUS(a0)
    csrw sstatus, t0
    ld t0, HSTATUS(a0)
    csrw hstatus, t0
    .irp n, 1,2,3,4,5,6,7,8,9,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31
    ld x\n, (8 * \n)(a0)
    .endr
    ld a0, 80(a0)
    sret

.balign 4
leave_guest:
    csrrw a0, sscratch, a0
    .irp n, 1,2,3,4,5,6,7,8,9,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31
    sd x\n, (8 * \n)(a0)
    .endr
    csrrw t0, sscratch, zero
    sd t0, 80(a0)
    la t0, hypervisor_trap
    csrw stvec, t0
    csrr t0, sepc
    sd t0, PC(a0)
    csrr t0, sstatus
    sd t0, SSTATUS(a0)
    csrr t0, hstatus
    sd t0, HSTATUS(a0)
    csrr t0, scause
    sd t0, SCAUSE(a0)
    csrr t0, stval
    sd t0, STVAL(a0)
    csrr t0, htval
    sd t0, HTVAL(a0)
    csrr t0, htinst
    sd t0, HTINST(a0)
    ld sp, HOST_SP(a0)
    ld ra, 0(sp)
    ld gp, 8(sp)
    ld tp, 16(sp)
    ld s0, 24(sp)
    ld s1, 32(sp)
    ld s2, 40(sp)
    ld s3, 48(sp)
    ld s4, 56(sp)
    ld s5, 64(sp)
    ld s6, 72(sp)
    ld s7, 80(sp)
    ld s8, 88(sp)
    ld s9, 96(sp)
    ld s10, 104(sp)
    ld s11, 112(sp)
    addi sp, sp, 128
    ret
