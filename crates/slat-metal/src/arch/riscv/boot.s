# From the firmware to Rust, and the traps of the hypervisor itself.
#
# The firmware enters `start` in HS-mode without address translation, with the hart's number in a0 and
# the device tree in a1 (SBI Specification, "Hart State Management Extension": all registers but these
# are undefined, interrupts are off). It enters `other_start` in the same way, with the number of the
# CPU in a1. Both call Rust on a stack of their own. tp has the number of the CPU, from here on.

.section .boot, "ax"
.global start
start:
    csrw sie, zero
    csrw satp, zero
    la t0, hypervisor_trap
    csrw stvec, t0
    csrw sscratch, zero
    # What the file of the image does not have: zeros.
    la t0, image_data_end
    la t1, image_end
1:  bgeu t0, t1, 2f
    sd zero, (t0)
    addi t0, t0, 8
    j 1b
2:  li tp, 0
    la sp, stacks
    li t0, STACK_BYTES
    add sp, sp, t0
    call boot_cpu_main
    unimp

.global other_start
other_start:
    csrw sie, zero
    csrw satp, zero
    la t0, hypervisor_trap
    csrw stvec, t0
    csrw sscratch, zero
    mv tp, a1
    la sp, stacks
    addi t0, a1, 1
    slli t0, t0, STACK_SHIFT
    add sp, sp, t0
    call other_cpu_main
    unimp

# Each trap of the hypervisor itself is a defect, but for the breakpoint of a semihosting call that no
# emulator has taken: it is noted, and passed by.
.text
.balign 4
.global hypervisor_trap
hypervisor_trap:
    csrw sscratch, t0
    csrr t0, scause
    addi t0, t0, -3
    bnez t0, 3f
    la t0, no_semihosting
    sd sp, (t0)
    csrr t0, sepc
    addi t0, t0, 4
    csrw sepc, t0
    csrr t0, sscratch
    csrw sscratch, zero
    sret
3:  csrr a0, scause
    csrr a1, sepc
    csrr a2, stval
    mv a3, sp
    call trap_main
    unimp

.section .bss.boot, "aw", @nobits
.balign 4096
.global stacks
stacks:
    .skip MAX_CPUS * STACK_BYTES
.balign 8
.global no_semihosting
no_semihosting:
    .skip 8
