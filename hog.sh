for i in 1 2; do (timeout 55 python -c "
import numpy as np
a=np.zeros(300000)
while 1: a+=1
" &) ; done
