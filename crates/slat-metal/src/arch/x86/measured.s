# The guest that is measured: it writes a word to each of some pages, in order, and stores for each
# how far the time-stamp counter went between the instructions around the write.
#
# The same code runs on slat-metal and on KVM, in 64-bit mode, on one CPU or on several, each with a
# block of words at rdi:
#   0  the address of the first page
#   8  the number of pages; 0 for a CPU that runs until the others are done
#  16  the distance between pages, in bytes
#  24  the address of the gate
#  32  how far the counter went from the moment when all CPUs had come until all were done
#  40  how often this CPU has looked whether all are done
#  48  for each page, the difference
# The gate has a word for each time that CPUs wait for each other. A word begins as their number:
#   0  CPUs that have not come
#   8  CPUs that are not done
#  16  CPUs that have not read the counter
# Then it writes to port 0x10, and begins again. It is copied for KVM: it has no addresses.
#
# A turn of the loop has 15 instructions. The difference is 5 where the write does not leave the
# guest: shl, or, mov, the write, rdtsc. A look has 4 instructions. Behind each pause the emulator
# goes to the next CPU.

.balign 256                             # in one page
.global measured_guest
measured_guest:
    mov rsi, [rdi]
    mov rcx, [rdi + 8]
    mov r10, [rdi + 16]
    mov r11, [rdi + 24]
    mov qword ptr [rdi + 40], 0
    lea r9, [rdi + 48]
    lock dec qword ptr [r11]
3:  pause
    cmp qword ptr [r11], 0
    jne 3b
    rdtsc
    shl rdx, 32
    or rax, rdx
    mov rbx, rax
    jrcxz 4f
2:  rdtsc
    shl rdx, 32
    or rax, rdx
    mov r8, rax
    mov [rsi], r8
    rdtsc
    shl rdx, 32
    or rax, rdx
    sub rax, r8
    mov [r9], rax
    add r9, 8
    add rsi, r10
    pause
    dec rcx
    jnz 2b
4:  lock dec qword ptr [r11 + 8]
5:  inc qword ptr [rdi + 40]
    pause
    cmp qword ptr [r11 + 8], 0
    jne 5b
    rdtsc
    shl rdx, 32
    or rax, rdx
    sub rax, rbx
    mov [rdi + 32], rax
    lock dec qword ptr [r11 + 16]
6:  pause
    cmp qword ptr [r11 + 16], 0
    jne 6b
    out 0x10, al
    jmp measured_guest
.global measured_guest_end
measured_guest_end:
